"""Phi-1, Phi-1.5 and Phi-2: attention and MLP side by side on one layer norm, biases everywhere, logits included."""

from dataclasses import replace

from bifolio.model.decoder_fields import NORM_EPS
from bifolio.model.families.family import Family
from bifolio.model.stored_form import either_qkv
from bifolio.model.tensor_names import GGUF_LLAMA, HF_LLAMA

FAMILY = Family(
    name="phi",
    network={"norm": "layer", "gated_mlp": False, "parallel_block": True},
    fields=(NORM_EPS,),
    hf_types=("phi",), hf_class="PhiForCausalLM",
    hf_defaults={"hidden_act": "gelu_new", "intermediate_size": 8192, "partial_rotary_factor": 0.5, "bos_token_id": 1,
                 "eos_token_id": 2},
    hf_implied=dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias", "head_bias"), True),
    hf_always=("partial_rotary_factor",),
    hf_refused={"qk_layernorm": "Phi models whose heads have layer norms of their own are not supported"},
    hf_names=replace(HF_LLAMA, output="self_attn.dense", up=("mlp.fc1",), down="mlp.fc2",
                     final_norm="model.final_layernorm"),
    gguf_architectures=("phi2",), gguf_implied={"activation": "gelu_tanh"},
    gguf_names=replace(GGUF_LLAMA, up=("ffn_up",)), gguf_source=either_qkv,
)  # fmt: skip
