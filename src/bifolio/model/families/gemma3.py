"""Gemma 3 and EmbeddingGemma: norms before and after attention and MLP, scaled embeddings, layers with a window.

Of six layers five have a window; these have a separate rope base without scaling. EmbeddingGemma sees tokens in both
directions and generates no text.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from bifolio.config import RopeConfig
from bifolio.model.decoder_fields import activation, scale_entry, usual_scale
from bifolio.model.description import Reading, Values, Writing
from bifolio.model.families.family import Family
from bifolio.model.fields import Field, Form
from bifolio.model.gguf.rope_fields import local_rope, read_rope, rope_entries
from bifolio.model.huggingface.rope_fields import read_ropes, written_ropes
from bifolio.model.tensor_names import HF_LLAMA
from bifolio.model.window_fields import BY_TYPE, GGUF_WINDOWS, TYPES, WINDOW, Windows, written_kinds

NORM_OFFSET = 1.0
HF_NAMES = replace(
    HF_LLAMA,
    mlp_norm="pre_feedforward_layernorm",
    post_attention_norm="post_attention_layernorm",
    post_mlp_norm="post_feedforward_layernorm",
)
ACTIVATION = Field("activation", hf=activation("hidden_activation", "hidden_act"))
TANH = "gelu_pytorch_tanh"
EMBEDDING_SCALE = Field("embedding_scale", default=lambda v: math.sqrt(v["hidden_size"]))
ENCODER = "gemma-embedding"  # `general.architecture`
GGUF_WINDOW = "attention.sliding_window"
LARGEST_LAYERS = 62  # the 27B model scales attention by hidden_size / heads instead of the head size


def scores(gguf: Form) -> Field:
    """The factor of scores, which folders store as the square of its reverse."""
    key = "query_pre_attn_scalar"

    def read(values: Reading) -> float:
        scalar = values.json.number(key, 0.0)
        if scalar < 0:
            raise values.json.wrong(key, "a positive number")
        return float(scalar**-0.5) if scalar else 0.0

    return Field("attention_scale", hf=Form(read, lambda v: {key: whole(v.config.scale**-2)}), gguf=gguf)


def gguf_scale(values: Values) -> float:
    if values["num_layers"] == LARGEST_LAYERS:
        return float((values["hidden_size"] / values["num_heads"]) ** -0.5)
    return usual_scale(values)


def read_gguf_scale(values: Reading) -> float:
    implied = gguf_scale(values) if values["num_layers"] == LARGEST_LAYERS else 0.0
    return values.header.number(".attention.scale", implied)


def whole(value: float) -> int | float:
    """Undo the f32 rounding of an integer stored in a file, because transformers requires the integer."""
    return round(value) if abs(value - round(value)) < 1e-5 * value else value


def half_windows(windows: Windows) -> Windows:
    """Windows of an encoder reach half of their size in each direction, and hold the token itself."""
    return tuple(None if window is None else window // 2 + 1 for window in windows)


def read_windows(values: Reading) -> Windows:
    windows: Windows = BY_TYPE.read(values)
    return half_windows(windows) if values["bidirectional"] else windows


def read_gguf_windows(values: Reading) -> Windows:
    windows: Windows = GGUF_WINDOWS.read(values)
    return half_windows(windows) if values["bidirectional"] else windows


def write_gguf_windows(values: Writing) -> dict[str, Any]:
    entries = dict(GGUF_WINDOWS.write(values))
    if values["bidirectional"] and GGUF_WINDOW in entries:
        entries[GGUF_WINDOW] = 2 * (entries[GGUF_WINDOW] - 1)
    return entries


def write_windows(values: Writing) -> dict[str, Any]:
    if not values["bidirectional"]:
        return dict(BY_TYPE.write(values))
    reach = max((window for window in values["layers.window"] if window is not None), default=None)
    return {WINDOW: None if reach is None else 2 * (reach - 1), TYPES: written_kinds(values)}


def ropes_to_hf(values: Writing) -> dict[str, Any]:
    return {**written_ropes(values), "rope_local_base_freq": values.config.ropes[-1].theta}


def ropes_from_gguf(values: Reading) -> tuple[RopeConfig, ...]:
    rope = read_rope(values)
    return (rope, local_rope(values, rope.rotary_dim)) if values["layers.window"] else (rope,)


FAMILY = Family(
    name="gemma3",
    network={"qk_norm": True, "post_norms": True},
    fields=(
        ACTIVATION,
        EMBEDDING_SCALE,
        scores(Form(read_gguf_scale, lambda v: scale_entry(v, gguf_scale(v)))),
        Field(
            "bidirectional",
            hf="use_bidirectional_attention",
            gguf=Form(lambda v: v.header.architecture == ENCODER),
            optional=True,
        ),
        Field("language_head", hf=Form(lambda v: not v["bidirectional"]), gguf=Form(lambda v: not v["bidirectional"])),
        Field("layers.window", hf=Form(read_windows, write_windows), gguf=Form(read_gguf_windows, write_gguf_windows)),
        Field("ropes", hf=Form(read_ropes, ropes_to_hf), gguf=Form(ropes_from_gguf, rope_entries)),
    ),
    window_period=6,
    hf_types=("gemma3_text", "gemma3"),
    hf_class="Gemma3ForCausalLM",
    hf_defaults={"hidden_activation": TANH, "tie_word_embeddings": True},
    hf_always=("final_logit_softcapping",),
    hf_text_part=True,
    hf_names=HF_NAMES,
    norm_offset=NORM_OFFSET,
    gguf_architectures=("gemma3", ENCODER),
    written_both_ways=ENCODER,
    gguf_implied={"activation": "gelu_tanh"},
)
