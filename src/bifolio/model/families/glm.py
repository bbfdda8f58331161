"""GLM-4-9B of 2024: joint gate and up, rope on pairs in half of each head. GGUF files call it `chatglm`."""

from dataclasses import replace

from bifolio.model.families.family import Family
from bifolio.model.stored_form import either_qkv
from bifolio.model.tensor_names import GGUF_LLAMA, HF_LLAMA

FAMILY = Family(
    name="glm",
    hf_types=("glm",),
    hf_class="GlmForCausalLM",
    hf_defaults={"num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072,
                 "rms_norm_eps": 1.5625e-7, "attention_bias": True, "partial_rotary_factor": 0.5,
                 "eos_token_id": [151329, 151336, 151338]},
    hf_implied={"output_bias": False, "mlp_bias": False, "layers.window": ()},
    hf_always=("attention_bias", "partial_rotary_factor"),
    hf_written={"pad_token_id": None},
    hf_names=replace(HF_LLAMA, up=("mlp.gate_up_proj",)),
    hf_interleaved=True,
    gguf_architectures=("chatglm",),
    gguf_names=replace(GGUF_LLAMA, up=("ffn_up",)),
    gguf_source=either_qkv,
    gguf_interleaved=True,
)  # fmt: skip
