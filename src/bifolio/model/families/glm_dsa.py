"""GLM-5 with an indexer as in DeepSeek-V3.2; layers without one read the positions that an earlier layer chose."""

from __future__ import annotations

from typing import Any

import numpy as np

from bifolio.model.description import Reading, Writing
from bifolio.model.families.deepseek2 import CHOICE, LATENTS, REFUSED, SplitByHead, joined_by_head
from bifolio.model.families.deepseek32 import BIASES, INDEXER, NEEDED, check_kinds
from bifolio.model.families.family import Family
from bifolio.model.fields import Field, Form
from bifolio.model.next_token_names import GGUF_NEXT_TOKEN, HF_NEXT_TOKEN
from bifolio.model.window_fields import named_kinds

FULL, SHARED = "full", "shared"
KINDS, PATTERN = "indexer_types", "index_topk_pattern"
GGUF_KINDS = ".attention.indexer.types"
LETTERS = {"F": FULL, "S": SHARED}
LONG_CONTEXT = 1 << 20  # tokens: files of such networks that name no layers have one indexer for four layers


def by_period(values: Reading, period: int, offset: int) -> tuple[bool, ...]:
    """An indexer in the first layers, and then in one layer of each period."""
    return tuple(max(layer - offset + 1, 0) % period == 0 for layer in values.layers)


def named_layers(values: Reading) -> tuple[bool, ...]:
    """Whether each layer has an indexer, by config.json."""
    check_kinds(values)
    json = values.json
    if json.get(KINDS) is None and json.get(PATTERN) is None:
        period = max(json.count("index_topk_freq", 1, least=0), 1)
        return by_period(values, period, json.count("index_skip_topk_offset", 2, least=0))
    key = KINDS if json.get(KINDS) is not None else PATTERN
    if isinstance(json.get(key), str):
        kinds = tuple(LETTERS.get(letter, letter) for letter in json.text(key))
    else:
        kinds = named_kinds(values, key)
    if len(kinds) != len(values.layers) or not set(kinds) <= {FULL, SHARED}:
        raise json.wrong(key, f"{FULL} or {SHARED} for each of {len(values.layers)} layers")
    return tuple(kind == FULL for kind in kinds)


def stored_layers(values: Reading) -> tuple[bool, ...]:
    """The same by the header of a GGUF file."""
    stored = values.header.array(GGUF_KINDS)
    if stored is None:
        return by_period(values, 4, 3) if values["max_position"] >= LONG_CONTEXT else ()
    if len(stored) < len(values.layers):  # some files count heads for multi-token prediction, too
        raise values.header.wrong(GGUF_KINDS, f"a list for {len(values.layers)} layers, not for {len(stored)},")
    return tuple(bool(kind) for kind in stored[: len(values.layers)].tolist())


def write_kinds(values: Writing) -> dict[str, Any]:
    return {KINDS: [FULL if chooses else SHARED for chooses in values["layers.chooses"]]}


def store_kinds(values: Writing) -> dict[str, Any]:
    return {GGUF_KINDS[1:]: np.array(values["layers.chooses"])}


FAMILY = Family(
    name="glm_dsa",
    network={"mla.index_interleaved": True},
    fields=(
        *LATENTS,
        *CHOICE,
        *INDEXER,
        Field("layers.chooses", hf=Form(named_layers, write_kinds), gguf=Form(stored_layers, store_kinds)),
    ),
    hf_types=("glm_moe_dsa",),
    hf_class="GlmMoeDsaForCausalLM",
    hf_defaults={"index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048, "rms_norm_eps": 1e-5,
                 "routed_scaling_factor": 2.5},
    hf_refused=BIASES,
    hf_needed={**NEEDED, "indexer_rope_interleave": True},
    hf_interleaved=True,
    folder_source=SplitByHead,
    folder_tensors=joined_by_head,
    gguf_architectures=("glm-dsa",),
    gguf_refused=REFUSED,
    gguf_interleaved=True,
    hf_next_token=HF_NEXT_TOKEN,
    gguf_next_token=GGUF_NEXT_TOKEN,
)  # fmt: skip
