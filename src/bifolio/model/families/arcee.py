"""Arcee (AFM): Llama with an ungated MLP of squared ReLU."""

from dataclasses import replace

from bifolio.model.families.family import Family
from bifolio.model.tensor_names import GGUF_LLAMA, HF_LLAMA

FAMILY = Family(
    name="arcee",
    network={"gated_mlp": False},
    hf_types=("arcee",),
    hf_class="ArceeForCausalLM",
    hf_defaults={"hidden_act": "relu2", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "bos_token_id": 128000,
                 "eos_token_id": 128001},
    hf_always=("attention_bias", "mlp_bias"),
    hf_names=replace(HF_LLAMA, up=("mlp.up_proj",)),
    gguf_architectures=("arcee",),
    gguf_implied={"activation": "relu2"},
    gguf_names=replace(GGUF_LLAMA, up=("ffn_up",)),
    gguf_interleaved=True,
)  # fmt: skip
