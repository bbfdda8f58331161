"""Youtu-LLM: attention over cached latents (MLA) and plain MLPs. GGUF files have the architecture `deepseek2`."""

from __future__ import annotations

from typing import Any

from bifolio.model.description import Writing
from bifolio.model.families.deepseek2 import LATENTS, REFUSED, SplitByHead, joined_by_head
from bifolio.model.families.family import Family
from bifolio.model.fields import Field, Form


def without_experts(values: Writing) -> dict[str, Any]:
    """The entries of a mixture that readers of the architecture ask for."""
    return {
        "leading_dense_block_count": values["num_layers"],
        "expert_feed_forward_length": values["intermediate_size"],
        "expert_shared_count": 0,
    }


FAMILY = Family(
    name="youtu",
    fields=(*LATENTS, Field("layers.dense", hf=None, gguf=Form(lambda v: (), without_experts), default=())),
    hf_types=("youtu",),
    hf_class="YoutuForCausalLM",
    hf_defaults={"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
                 "v_head_dim": 128, "tie_word_embeddings": True, "max_position_embeddings": 131072,
                 "bos_token_id": 128000, "eos_token_id": 128001},
    hf_implied={"mlp_bias": False, "layers.window": ()},
    hf_always=("tie_word_embeddings",),
    hf_refused={"attention_bias": "Youtu-LLM with biases in attention is not supported"},
    hf_needed={"rope_interleave": True},
    hf_interleaved=True,
    folder_source=SplitByHead,
    folder_tensors=joined_by_head,
    written_as="deepseek2",
    gguf_refused=REFUSED,
    gguf_interleaved=True,
)  # fmt: skip
