"""DeepSeek-V3.2: DeepSeek-V3 with an indexer, which chooses the positions that each query attends to."""

from __future__ import annotations

from typing import Any

from bifolio.errors import UnsupportedModelError
from bifolio.model.description import Reading, Writing
from bifolio.model.expert_fields import dense_by_type
from bifolio.model.families.deepseek2 import BIASED, CHOICE, LATENTS, REFUSED, SplitByHead, joined_by_head
from bifolio.model.families.family import Family
from bifolio.model.fields import REQUIRED, Field, Form, Key
from bifolio.model.next_token_names import GGUF_NEXT_TOKEN, HF_NEXT_TOKEN
from bifolio.model.window_fields import TYPES, named_kinds

KINDS = ("indexed_attention", "deepseek_sparse_attention")  # names of the one kind of layers
NEEDED = {"rope_interleave": True, "topk_method": BIASED, "scoring_func": "sigmoid", "moe_layer_freq": 1}
BIASES = dict.fromkeys(("attention_bias", "mlp_bias"), "networks with an indexer and biases are not supported")


def check_kinds(values: Reading) -> None:
    """Refuse layers without an indexer."""
    kinds = named_kinds(values) if values.json.get(TYPES) is not None else ()
    others = sorted(set(kinds) - set(KINDS))
    if others:
        raise UnsupportedModelError(f"{values.json.path}: {TYPES} has {others[0]!r}; supported: {', '.join(KINDS)}")


def every_layer(values: Reading) -> tuple[bool, ...]:
    check_kinds(values)
    return ()


def write_choice(values: Writing) -> dict[str, Any]:
    """Sigmoids and a bias choose the experts."""
    if values["moe.scoring"] != "sigmoid" or not values["moe.selection_bias"]:
        raise values.refusal("experts that are not chosen by sigmoids and a bias")
    return {"topk_method": BIASED}


INDEXER = (
    Field("mla.query_rank", hf=Key("q_lora_rank", default=REQUIRED)),
    Field("mla.index_heads", hf="index_n_heads", gguf="attention.indexer.head_count", default=REQUIRED),
    Field("mla.index_size", hf="index_head_dim", gguf="attention.indexer.key_length", default=REQUIRED),
    Field("mla.index_top_k", hf="index_topk", gguf="attention.indexer.top_k", default=REQUIRED),
    Field("moe.selection_bias", hf=Form(lambda v: True, write_choice)),
    Field("layers.dense", hf=dense_by_type(3)),
)

FAMILY = Family(
    name="deepseek32",
    fields=(*LATENTS, *CHOICE, *INDEXER, Field("layers.chooses", hf=Form(every_layer))),
    hf_types=("deepseek_v32",),
    hf_class="DeepseekV32ForCausalLM",
    hf_defaults={"index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048, "n_group": 8, "topk_group": 4,
                 "routed_scaling_factor": 2.5},
    hf_refused={**BIASES, "indexer_rope_interleave": "the indexer of DeepSeek-V3.2 rotates halves of its heads"},
    hf_needed=NEEDED,
    hf_interleaved=True,
    folder_source=SplitByHead,
    folder_tensors=joined_by_head,
    gguf_architectures=("deepseek32",),
    gguf_refused=REFUSED,
    gguf_interleaved=True,
    hf_next_token=HF_NEXT_TOKEN,
    gguf_next_token=GGUF_NEXT_TOKEN,
)  # fmt: skip
