"""Gemma 2: Gemma 3 without norms of heads, with soft-capped scores and logits, and a window on every second layer."""

from __future__ import annotations

from typing import Any

from bifolio.model.decoder_fields import scale_entry, usual_scale
from bifolio.model.description import Reading, Values
from bifolio.model.families.family import Family
from bifolio.model.families.gemma3 import ACTIVATION, EMBEDDING_SCALE, HF_NAMES, NORM_OFFSET, TANH, scores
from bifolio.model.fields import Field, Form, Key
from bifolio.model.window_fields import BY_TYPE, GGUF_WINDOWS

WINDOW = 4096  # of files that do not say it
LARGEST_LAYERS = 46  # the 27B model scales attention by hidden_size / heads instead of the head size


def gguf_scale(values: Values) -> float:
    if values["num_layers"] == LARGEST_LAYERS:
        return float((values["hidden_size"] // values["num_heads"]) ** -0.5)
    return usual_scale(values)


def windows_from_gguf(values: Reading) -> Any:
    """Older files do not say that every second layer has a window."""
    return GGUF_WINDOWS.read(values) or tuple(None if layer % 2 else WINDOW for layer in values.layers)


FIELDS = (
    ACTIVATION,
    EMBEDDING_SCALE,
    scores(
        Form(
            lambda v: v.header.number(".attention.scale", 0.0) or gguf_scale(v),
            lambda v: scale_entry(v, gguf_scale(v)),
        )
    ),
    Field("layers.window", hf=BY_TYPE, gguf=Form(windows_from_gguf, GGUF_WINDOWS.write)),
    Field("attention_softcap", gguf=Key("attn_logit_softcapping", default=50.0, optional=False)),
    Field("logit_softcap", gguf=Key("final_logit_softcapping", default=30.0, optional=False)),
)
DEFAULTS = {"hidden_activation": TANH, "query_pre_attn_scalar": 256, "sliding_window": WINDOW,
            "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "tie_word_embeddings": True}  # fmt: skip
CAPS = ("attn_logit_softcapping", "final_logit_softcapping")

FAMILY = Family(
    name="gemma2",
    network={"post_norms": True},
    fields=FIELDS,
    window_period=2,
    hf_types=("gemma2",),
    hf_class="Gemma2ForCausalLM",
    hf_defaults=DEFAULTS,
    hf_always=CAPS,
    hf_names=HF_NAMES,
    norm_offset=NORM_OFFSET,
    gguf_architectures=("gemma2",),
    gguf_implied={"activation": "gelu_tanh"},
)
