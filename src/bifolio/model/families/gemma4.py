"""Gemma 4: Gemma 3 with larger heads and another rope in the layers without a window, whose keys may be their values.

Values are normed, and the residual stream is multiplied by a number behind each layer. In the small models (E2B, E4B)
every layer has an input of its own, and the last layers read the keys and values of earlier ones. The 26B-A4B model has
experts beside the MLPs. Folders of the 12B model ("unified") describe the same network with other defaults.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bifolio.config import MODEL_LIMITS, ModelConfig, RopeConfig
from bifolio.errors import UnsupportedModelError
from bifolio.model.description import Reading, Values, Writing
from bifolio.model.expert_fields import ADD_UP, EXPERTS
from bifolio.model.families.family import Family
from bifolio.model.families.gemma3 import ACTIVATION, EMBEDDING_SCALE, HF_NAMES, TANH
from bifolio.model.fields import Field, Form, Key, usual
from bifolio.model.gguf.rope_fields import local_rope, rope_entries
from bifolio.model.gguf.rope_fields import read_rope as gguf_rope
from bifolio.model.huggingface.rope_fields import BY_KIND, PARAMETERS, read_rope
from bifolio.model.model_file import TensorSource
from bifolio.model.stored_form import StoredForm, reading, writing
from bifolio.model.stream_tensors import GGUF_LAYER_INPUTS, HF_LAYER_INPUTS
from bifolio.model.tensor_names import GGUF_LLAMA
from bifolio.model.window_fields import BY_TYPE, FULL, GGUF_WINDOWS, LOCAL, WINDOW, Windows, layer_kinds, of_layers
from bifolio.quant.tensor import QuantizedTensor

GATE_UP = "ffn_gate_up_exps"
UNIFIED = "gemma4_unified"
UNIFIED_DEFAULTS = {"sliding_window": 1024, "hidden_size_per_layer_input": 0, "max_position_embeddings": 262144}
SHARED, DOUBLE, KEYS_AS_VALUES = "num_kv_shared_layers", "use_double_wide_mlp", "attention_k_eq_v"
INPUTS, ROWS, WIDTH = "hidden_size_per_layer_input", "vocab_size_per_layer_input", "intermediate_size"
GGUF_WIDTH, GGUF_HEADS = "feed_forward_length", "attention.head_count_kv"
GGUF_INPUTS = "embedding_length_per_layer_input"
ROPES: dict[str, dict[str, Any]] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
}


# -- fields that Gemma 3n has, too ------------------------------------------------------------------------------------
def where_different(values: tuple[int, ...]) -> tuple[int, ...]:
    return values if len(set(values)) > 1 else ()


def shared_layers(hf: Callable[[Reading], int], gguf: Callable[[Reading], int]) -> Field:
    """The last layers read the keys and values of the last layer of their kind before them."""
    return Field(
        "layers.kv_source",
        hf=Form(lambda v: kv_sources(v, hf(v)), lambda v: {SHARED: num_shared(v)}),
        gguf=Form(lambda v: kv_sources(v, gguf(v)), lambda v: {"attention.shared_kv_layers": num_shared(v)}),
    )


def kv_sources(values: Reading, shared: int) -> tuple[int | None, ...]:
    kinds = [window is None for window in usual("window", values["layers.window"], len(values.layers))]
    first = len(kinds) - shared
    if not shared:
        return ()
    if first < 1 or not set(kinds[first:]) <= set(kinds[:first]):
        raise UnsupportedModelError(f"{shared} of {len(kinds)} layers find no layer whose keys and values they read")
    last = {kind: layer for layer, kind in enumerate(kinds[:first])}
    return tuple(None if layer < first else last[kind] for layer, kind in enumerate(kinds))


def num_shared(values: Values) -> int:
    return sum(source is not None for source in values["layers.kv_source"])


def mlp_sizes(values: Writing) -> list[int]:
    return [values.config.mlp_size(layer) for layer in values.layers]


def sizes_from_gguf(values: Reading, key: str) -> tuple[int, ...]:
    return values.header.by_layer(f".{key}", len(values.layers))


def sizes_to_gguf(key: str, sizes: list[int]) -> dict[str, Any]:
    """One value for all layers, or one for each."""
    return {key: sizes[0] if len(set(sizes)) == 1 else np.array(sizes, np.int32)}


def pattern_to_gguf(values: Writing) -> dict[str, Any]:
    """Other programs read the windows of each layer."""
    pattern = np.array([window is not None for window in values["layers.window"]])
    return {**GGUF_WINDOWS.write(values), "attention.sliding_window_pattern": pattern}


MLP_SIZES = (
    Field(
        "intermediate_size",
        gguf=Form(lambda v: sizes_from_gguf(v, GGUF_WIDTH)[0], lambda v: sizes_to_gguf(GGUF_WIDTH, mlp_sizes(v))),
    ),
    Field("layers.mlp_size", gguf=Form(lambda v: where_different(sizes_from_gguf(v, GGUF_WIDTH)))),
)
INPUT_ROWS = Field(
    "layer_inputs.vocab_size",
    hf=ROWS,
    gguf=Form(lambda v: v.header.shape("per_layer_token_embd.weight")[0]),
)


# -- folders ----------------------------------------------------------------------------------------------------------
def windows(values: Reading) -> Windows:
    """The last layer has no window."""
    if values.json.get("use_bidirectional_attention") == "all":
        raise UnsupportedModelError("models whose tokens attend to later ones are not supported")
    values.json.count(WINDOW)  # there must be one
    return of_layers(values, [*(kind == LOCAL for kind in layer_kinds(values)[:-1]), False])


def full_layer(values: Values) -> int:
    """The first layer without a window."""
    return list(values["layers.window"]).index(None)


def sizes_by_kind(values: Reading, key: str, full: int) -> tuple[int, ...]:
    """The size of each layer: as the file names them, or one for layers without and one for layers with a window."""
    most = MODEL_LIMITS["head_dim"]
    usual, own = values.json.count(key, most=most), values.json.object("per_layer_config")
    if own:
        return tuple(own.object(str(layer)).count(key, usual, most=most) for layer in values.layers)
    return tuple(full if window is None else usual for window in values["layers.window"])


def head_sizes(values: Reading) -> tuple[int, ...]:
    return sizes_by_kind(values, "head_dim", values.json.count("global_head_dim", most=MODEL_LIMITS["head_dim"]))


def kv_heads(values: Reading) -> tuple[int, ...]:
    usual = values.json.count("num_key_value_heads")
    is_own = values.json.flag(KEYS_AS_VALUES, False)
    full = values.json.count("num_global_key_value_heads", usual) if is_own else usual
    return sizes_by_kind(values, "num_key_value_heads", full)


def double_widths(values: Reading) -> tuple[int, ...]:
    if not values.json.flag(DOUBLE, False):
        return ()
    first, width = len(values.layers) - num_shared(values), values["intermediate_size"]
    return tuple(width * (2 if layer >= first else 1) for layer in values.layers)


def keys_as_values(values: Reading) -> tuple[bool, ...]:
    if not values.json.flag(KEYS_AS_VALUES, False):
        return ()
    first = len(values.layers) - num_shared(values)
    return tuple(window is None and layer < first for layer, window in enumerate(values["layers.window"]))


def write_global_heads(values: Writing) -> dict[str, Any]:
    is_own, layer = any(values["layers.keys_as_values"]), full_layer(values)
    return {"num_global_key_value_heads": values.config.kv_heads(layer) if is_own else None, KEYS_AS_VALUES: is_own}


def ropes(values: Reading) -> tuple[RopeConfig, ...]:
    own = values.json.object(PARAMETERS)
    own = own or own.with_values(ROPES)
    full = head_sizes(values)[full_layer(values)]
    sizes = {FULL: full, LOCAL: values.json.count("head_dim")}
    return tuple(
        read_rope(values, own.needed_object(kind).with_defaults({"rope_theta": ROPES[kind]["rope_theta"]}), size)
        for kind, size in sizes.items()
    )


def write_inputs(values: Writing) -> dict[str, int]:
    inputs = values.config.layer_inputs
    rows = values.config.vocab_size if inputs is None else inputs.vocab_size
    return {INPUTS: 0 if inputs is None else inputs.size, ROWS: rows}


def write_experts(values: Writing) -> dict[str, Any]:
    moe = values.config.moe
    return {"enable_moe_block": moe is not None, **({} if moe is None else {"num_experts": moe.num_experts})}


# -- GGUF files -------------------------------------------------------------------------------------------------------
def windows_from_gguf(values: Reading) -> Windows:
    key = ".attention.sliding_window_pattern"
    pattern = values.header.array(key)
    if pattern is None or len(pattern) != len(values.layers) or pattern.all():
        raise values.header.wrong(key, "a list that says which layers have a window, and one must have none")
    values.header.count(".attention.sliding_window", least=1)
    found: Windows = GGUF_WINDOWS.read(values)
    return found


def head_sizes_from_gguf(values: Reading) -> tuple[int, int]:
    """Of layers without and with a window."""
    full = values.header.count(".attention.key_length", least=1)
    return full, values.header.count(".attention.key_length_swa", full, least=1)


def layer_sizes_from_gguf(values: Reading) -> tuple[int, ...]:
    full, local = head_sizes_from_gguf(values)
    return tuple(full if window is None else local for window in values["layers.window"]) if full != local else ()


def head_sizes_to_gguf(values: Writing) -> dict[str, Any]:
    full, local = values.config.head_size(full_layer(values)), values["head_dim"]
    sizes = {"attention.key_length": full, "attention.value_length": full}
    return {**sizes, "attention.key_length_swa": local, "attention.value_length_swa": local}


def ropes_from_gguf(values: Reading) -> tuple[RopeConfig, ...]:
    full = gguf_rope(values)
    full = replace(full, scaling="proportional") if full.frequency_factors else full
    return full, local_rope(values, values.header.count(".rope.dimension_count_swa", values["head_dim"]))


def keys_as_values_from_gguf(values: Reading) -> tuple[bool, ...]:
    first = len(values.layers) - num_shared(values)
    own = (values.header.has_tensor(f"blk.{layer}.attn_v.weight") for layer in values.layers)
    return tuple(layer < first and not has_values for layer, has_values in enumerate(own))


# -- tensors ----------------------------------------------------------------------------------------------------------
def _form(config: ModelConfig) -> StoredForm:
    """Folders name the experts without a suffix."""
    names = ("experts.gate_up_proj", "experts.down_proj")
    return StoredForm(renamed=tuple((f"{name}.weight", name) for name in names))


@dataclass(frozen=True, slots=True)
class JoinedExperts:
    """The tensors of a GGUF file; gate and up of the experts as one tensor, also where the file has two."""

    inner: TensorSource

    def has(self, name: str) -> bool:
        return self.inner.has(name)

    def view(self, name: str, shape: tuple[int, ...]) -> QuantizedTensor:
        if not name.endswith(f".{GATE_UP}.weight") or self.inner.has(name):
            return self.inner.view(name, shape)
        count, rows, columns = shape
        gate, up = (
            self.inner.view(name.replace(GATE_UP, part), (count, rows // 2, columns)) for part in GGUF_LLAMA.expert_up
        )
        parts = [part.data.reshape(count, rows // 2, -1) for part in (gate, up.converted(gate.format, name))]
        return QuantizedTensor(gate.format, np.concatenate(parts, axis=1).reshape(count * rows, -1), shape)


LAYERS = (
    Field("layers.window", hf=Form(windows, BY_TYPE.write), gguf=Form(windows_from_gguf, pattern_to_gguf)),
    Field(
        "head_dim",
        hf=Key("head_dim", reader=lambda v: v.json.count("head_dim") if v["layers.head_dim"] else head_sizes(v)[0]),
        gguf=Form(lambda v: head_sizes_from_gguf(v)[1], head_sizes_to_gguf),
    ),
    Field(
        "layers.head_dim",
        hf=Form(
            lambda v: where_different(head_sizes(v)), lambda v: {"global_head_dim": v.config.head_size(full_layer(v))}
        ),
        gguf=Form(layer_sizes_from_gguf),
    ),
    Field(
        "num_kv_heads",
        gguf=Form(
            lambda v: sizes_from_gguf(v, GGUF_HEADS)[0],
            lambda v: sizes_to_gguf(GGUF_HEADS, [v.config.kv_heads(layer) for layer in v.layers]),
        ),
    ),
    Field(
        "layers.kv_heads",
        hf=Form(lambda v: where_different(kv_heads(v)), write_global_heads),
        gguf=Form(lambda v: where_different(sizes_from_gguf(v, GGUF_HEADS))),
    ),
    *MLP_SIZES,
    Field("layers.mlp_size", hf=Form(double_widths, lambda v: {DOUBLE: len(set(mlp_sizes(v))) > 1})),
    shared_layers(
        lambda v: v.json.count(SHARED, 0, least=0), lambda v: v.header.count(".attention.shared_kv_layers", 0)
    ),
    Field("layers.keys_as_values", hf=Form(keys_as_values), gguf=Form(keys_as_values_from_gguf)),
    Field("layers.rope", hf=None, gguf=None, default=lambda v: tuple(int(w is not None) for w in v["layers.window"])),
    Field(
        "ropes",
        hf=Form(ropes, BY_KIND.write),
        gguf=Form(
            ropes_from_gguf, lambda v: {**rope_entries(v), "rope.dimension_count_swa": v.config.ropes[-1].rotary_dim}
        ),
    ),
    Field("layer_scales", gguf=Form(lambda v: v.header.has_tensor("blk.0.layer_output_scale.weight"))),
    Field(
        "layer_inputs.size",
        hf=Form(lambda v: v.json.count(INPUTS, 0, least=0), write_inputs),
        gguf=Form(lambda v: v.header.count(f".{GGUF_INPUTS}", 0), lambda v: {GGUF_INPUTS: v["layer_inputs.size"] or 0}),
    ),
    INPUT_ROWS,
)
MIXTURES = (
    *EXPERTS,
    ADD_UP,
    Field(
        "moe.num_experts",
        hf=Form(lambda v: v.json.count("num_experts") if v.json.flag("enable_moe_block", False) else 0, write_experts),
        gguf=Key("expert_count", default=0),
    ),
    Field("moe.top_k", hf="top_k_experts"),
    Field("moe.scale", gguf=Key("expert_weights_scale", reader=lambda v: 1.0)),
    Field("moe.beside_mlp", default=True),
)

FAMILY = Family(
    name="gemma4",
    network={"attention_scale": 1.0, "qk_norm": True, "value_norm": True, "post_norms": True},
    fields=(
        ACTIVATION,
        EMBEDDING_SCALE,
        *LAYERS,
        *MIXTURES,
        Field("logit_softcap", gguf=Key("final_logit_softcapping", optional=False)),  # other programs assume 30
    ),
    window_period=6,
    hf_types=("gemma4_text", "gemma4", f"{UNIFIED}_text", UNIFIED),
    hf_class="Gemma4ForCausalLM",
    hf_defaults={"hidden_activation": TANH, "head_dim": 256, "global_head_dim": 512, "sliding_window": 512,
                 INPUTS: 256, ROWS: 262144, "tie_word_embeddings": True, "max_position_embeddings": 131072,
                 "bos_token_id": 2, "eos_token_id": 1},
    hf_type_defaults={UNIFIED: UNIFIED_DEFAULTS, f"{UNIFIED}_text": UNIFIED_DEFAULTS},
    hf_implied={"layer_scales": True},
    hf_always=("attention_bias", "final_logit_softcapping"),
    hf_text_part=True,
    hf_names=replace(
        HF_NAMES,
        layer_scale="layer_scalar",
        layer_inputs=HF_LAYER_INPUTS,
        router="router.proj",
        router_scale="router.scale",
        expert_scales="router.per_expert_scale",
        expert_up=("experts.gate_up_proj",),
        expert_down="experts.down_proj",
        expert_norm="pre_feedforward_layernorm_2",
        post_expert_norm="post_feedforward_layernorm_2",
        post_shared_norm="post_feedforward_layernorm_1",
    ),
    folder_source=reading(_form),
    folder_tensors=writing(_form),
    gguf_architectures=("gemma4",),
    gguf_implied={"activation": "gelu_tanh"},
    gguf_names=replace(
        GGUF_LLAMA,
        layer_scale="layer_output_scale.weight",
        layer_inputs=GGUF_LAYER_INPUTS,
        router_scale="ffn_gate_inp.scale",
        expert_scales="ffn_down_exps.scale",
        expert_up=(GATE_UP,),
        expert_norm="pre_ffw_norm_2",
        post_expert_norm="post_ffw_norm_2",
        post_shared_norm="post_ffw_norm_1",
    ),
    gguf_source=lambda source, config: source if config.moe is None else JoinedExperts(source),
)  # fmt: skip
