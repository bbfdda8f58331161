"""Phi-3 and Phi-4: queries, keys and values in one matrix, gate and up in another; a window on every layer."""

from dataclasses import replace

from bifolio.model.families.family import Family
from bifolio.model.tensor_names import GGUF_LLAMA, HF_LLAMA

FAMILY = Family(
    name="phi3",
    hf_types=("phi3",),
    hf_class="Phi3ForCausalLM",
    hf_always=("sliding_window", "partial_rotary_factor"),
    hf_written={"pad_token_id": None},
    hf_names=replace(HF_LLAMA, qkv=("self_attn.qkv_proj",), up=("mlp.gate_up_proj",)),
    gguf_architectures=("phi3",),
    gguf_names=replace(GGUF_LLAMA, qkv=("attn_qkv",), up=("ffn_up",)),
)
