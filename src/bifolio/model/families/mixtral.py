"""Mixtral: Mistral with experts. Its GGUF files have the architecture `llama`."""

from dataclasses import replace

from bifolio.model.expert_fields import ADD_UP, EXPERTS, LOCAL_EXPERTS, WIDE
from bifolio.model.families.family import Family
from bifolio.model.tensor_names import HF_LLAMA

FAMILY = Family(
    name="mixtral",
    fields=(*EXPERTS, LOCAL_EXPERTS, WIDE, ADD_UP),
    hf_types=("mixtral",),
    hf_class="MixtralForCausalLM",
    hf_modules={"mlp.": "block_sparse_moe."},
    hf_defaults={"num_experts_per_tok": 2},
    hf_always=("sliding_window",),
    hf_names=replace(
        HF_LLAMA,
        router="block_sparse_moe.gate",
        expert_up=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
        expert_down="block_sparse_moe.experts.{}.w2",
    ),
    written_as="llama",
    gguf_interleaved=True,
)
