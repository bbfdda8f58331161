"""OLMo Hybrid: gated delta nets with larger rates, and in every fourth layer the attention of OLMo 2.

Norms lie on the inputs of recurrent layers and on the outputs of layers with attention. Released models have no rope.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bifolio.config import ModelConfig, RopeConfig
from bifolio.errors import ModelFileError, UnsupportedModelError
from bifolio.model.description import Reading, Values, Writing
from bifolio.model.families.family import Family
from bifolio.model.fields import Field, Form, Key
from bifolio.model.gguf.rope_fields import read_rope, rope_entries
from bifolio.model.huggingface.rope_fields import PARAMETERS, read_ropes, rope_object
from bifolio.model.model_file import TensorSource
from bifolio.model.recurrent_fields import EITHER, HEADS, HEADS_BY_LAYER, separate_names
from bifolio.model.tensor_names import GGUF_LLAMA, HF_LLAMA
from bifolio.model.window_fields import FULL, TYPES, named_kinds
from bifolio.quant.tensor import QuantizedTensor

LINEAR, INTERVAL = "linear_attention", 4  # one layer of so many has attention
NORM_EPS = 1e-5  # of the norms behind the recurrences, whatever that of the others is
NEGATIVE, LARGER = "linear_allow_neg_eigval", 2.0  # rates up to 2 give eigenvalues down to -1
CONVOLUTIONS = ("q_conv1d", "k_conv1d", "v_conv1d")
OTHER_NAMES = {  # of the norms of recurrent layers
    ".input_layernorm.": ".attention_layer_norm.",
    ".post_attention_layernorm.": ".feedforward_layer_norm.",
}


# -- the description --------------------------------------------------------------------------------------------------
def attention_from_hf(values: Reading) -> tuple[bool, ...]:
    if values.json.get(TYPES) is None:
        found = [layer % INTERVAL == INTERVAL - 1 for layer in values.layers]
        return tuple(found) if any(found) else (*found[:-1], True)
    kinds = named_kinds(values)
    if unknown := set(kinds) - {FULL, LINEAR}:
        raise UnsupportedModelError(f"layers of the kind {unknown.pop()!r} are not supported in OLMo Hybrid")
    return tuple(kind == FULL for kind in kinds)


def attention_to_hf(values: Writing) -> dict[str, list[str]]:
    return {TYPES: [FULL if attends else LINEAR for attends in values["layers.attention"]]}


def ropes_from_hf(values: Reading) -> tuple[RopeConfig, ...]:
    """None where the base of the frequencies is null."""
    own = values.json.get(PARAMETERS)
    names_base = isinstance(own, Mapping) and "rope_theta" in own
    base = own["rope_theta"] if names_base else values.json.get("rope_theta")
    return () if base is None else read_ropes(values)


def ropes_to_hf(values: Writing) -> dict[str, Any]:
    ropes = values.config.ropes
    return {PARAMETERS: rope_object(ropes[0]) if ropes else {"rope_type": "default", "rope_theta": None}}


def rate_scale(values: Reading) -> float:
    return LARGER if values.json.flag(NEGATIVE, True) else 1.0


def write_rate_scale(values: Writing) -> dict[str, bool]:
    scale = values["recurrent.rate_scale"]
    if scale not in (1.0, LARGER):
        raise values.refusal(f"rates times {scale}", f"rates times 1 or {LARGER:g}")
    return {NEGATIVE: scale == LARGER}


def key_size(values: Values) -> int:
    return int(0.75 * values["hidden_size"] / values["recurrent.groups"])


FIELDS = (
    *HEADS,
    *HEADS_BY_LAYER,
    EITHER,
    Field("layers.attention", hf=Form(attention_from_hf, attention_to_hf)),
    Field("layers.norms_outputs", default=lambda v: v["layers.attention"]),
    Field(
        "ropes",
        hf=Form(ropes_from_hf, ropes_to_hf),
        gguf=Form(
            lambda v: (read_rope(v),) if v.header.has(".rope.freq_base") else (),
            lambda v: rope_entries(v) if v.config.ropes else {},
        ),
    ),
    Field("recurrent.width", hf=Key("linear_conv_kernel_dim", default=4)),
    Field("recurrent.heads", hf=Key("linear_num_value_heads", default=lambda v: v["num_heads"])),
    Field("recurrent.groups", hf=Key("linear_num_key_heads", default=lambda v: v["num_heads"])),
    Field("recurrent.key_size", hf=Key("linear_key_head_dim", default=key_size)),
    Field("recurrent.value_size", hf=Key("linear_value_head_dim", default=lambda v: 2 * v["recurrent.key_size"])),
    Field("recurrent.rate_scale", hf=Form(rate_scale, write_rate_scale), gguf="ssm.rate_scale"),
)


# -- tensors ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class OwnTensors:
    """The tensors of a folder, whose norms of recurrent layers may have either of two names.

    transformers saves the convolutions of queries, keys and values as three equal parts of all of them, also where
    keys and values differ in size.
    """

    source: TensorSource
    config: ModelConfig

    def _name(self, name: str) -> str:
        for one, other in OTHER_NAMES.items():
            renamed = name.replace(one, other)
            if not self.source.has(name) and self.source.has(renamed):
                return renamed
        return name

    def has(self, name: str) -> bool:
        return self.source.has(self._name(name))

    def view(self, name: str, shape: tuple[int, ...]) -> QuantizedTensor:
        own, part = self.config.recurrent, next((part for part in CONVOLUTIONS if part in name), None)
        if own is None or part is None:
            return self.source.view(self._name(name), shape)
        try:
            return self.source.view(name, shape)
        except ModelFileError:
            third, rest = divmod(own.channels, 3)
            if rest or not self.source.has(name):
                raise
            sizes = third, *shape[1:]
            parts = [self.source.view(name.replace(part, other), sizes).dequantize() for other in CONVOLUTIONS]
        keys = own.groups * own.key_size
        first = CONVOLUTIONS.index(part) * keys
        return QuantizedTensor.from_array(np.concatenate(parts)[first : first + shape[0]])


FAMILY = Family(
    name="olmo_hybrid",
    network={"qk_norm": True, "qk_norm_all_heads": True, "recurrent.kind": "delta", "recurrent.norm_eps": NORM_EPS},
    fields=FIELDS,
    hf_types=("olmo_hybrid",),
    hf_class="OlmoHybridForCausalLM",
    hf_defaults={"rope_theta": 10000.0, "max_position_embeddings": 65536, "eos_token_id": 100257},
    hf_implied={"layers.window": (), "mlp_bias": False},
    hf_always=("attention_bias",),
    hf_written={"pad_token_id": None},  # the default of padding lies outside of small vocabularies
    hf_refused={"sliding_window": "OLMo Hybrid with windows is not supported",
                "mlp_bias": "OLMo Hybrid with biases in its MLPs is not supported"},
    hf_names=replace(
        HF_LLAMA,
        post_attention_norm="post_attention_layernorm",
        post_mlp_norm="post_feedforward_layernorm",
        recurrent=replace(
            separate_names(
                "linear_attn.", ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj"), "{}_conv1d", "o_proj",
                ("A_log", "dt_bias", "o_norm"),
            ),
            decay_log=True,
        ),
    ),
    folder_source=OwnTensors,
    gguf_architectures=("olmo-hybrid",),
    gguf_names=replace(
        GGUF_LLAMA,
        recurrent=separate_names(
            "", ("attn_q", "attn_k", "attn_v", "attn_gate", "ssm_beta", "ssm_alpha"), "ssm_conv1d_{}", "ssm_out",
            ("ssm_a", "ssm_dt.bias", "ssm_norm"),
        ),
    ),
)  # fmt: skip
