"""Gemma 4: Gemma 3 with larger heads and another rope in the layers without a window, whose keys may be their values.

Values are normed, and the residual stream is multiplied by a number behind each layer. In the small models (E2B, E4B)
every layer has an input of its own, and the last layers read the keys and values of earlier ones. The 26B-A4B model has
experts beside the MLPs. Folders of the 12B model ("unified") describe the same network with other defaults.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bifolio.config import MODEL_LIMITS, LayerInputConfig, ModelConfig, MoeConfig, RopeConfig
from bifolio.errors import ModelFileError, UnsupportedModelError
from bifolio.model.families.family import Family
from bifolio.model.families.gemma3 import HF_NAMES
from bifolio.model.gguf.decoder_config import decoder_from_gguf, experts_from_gguf, matrix_rows
from bifolio.model.gguf.entries import Metadata
from bifolio.model.gguf.reader import GgufFile, Value
from bifolio.model.huggingface.decoder_config import (
    Raw,
    decoder_from_hf,
    decoder_to_hf,
    largest_window,
    layer_types,
    read_activation,
    read_rope,
    write_activation,
    written_layer_types,
)
from bifolio.model.model_file import TensorSource
from bifolio.model.stored_form import StoredForm, reading, writing
from bifolio.model.stream_tensors import GGUF_LAYER_INPUTS, HF_LAYER_INPUTS
from bifolio.model.tensor_names import GGUF_LLAMA
from bifolio.quant.tensor import QuantizedTensor

WINDOW_PERIOD = 6
GATE_UP = "ffn_gate_up_exps"
STILL = 1e30  # divisor of the frequencies of dimensions that are not rotated
DEFAULTS = {"hidden_activation": "gelu_pytorch_tanh", "head_dim": 256, "global_head_dim": 512, "sliding_window": 512,
            "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144, "tie_word_embeddings": True,
            "max_position_embeddings": 131072, "bos_token_id": 2, "eos_token_id": 1}  # fmt: skip
UNIFIED = "gemma4_unified"
UNIFIED_DEFAULTS = {"sliding_window": 1024, "hidden_size_per_layer_input": 0, "max_position_embeddings": 262144}
ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
}


# -- folders ----------------------------------------------------------------------------------------------------------
def config_from_hf(raw: Raw, name: str) -> ModelConfig:
    if isinstance(raw.get("text_config"), Mapping):
        raw = raw["text_config"]  # a model of text, images and sounds
    own = UNIFIED_DEFAULTS if str(raw.get("model_type")).startswith(UNIFIED) else {}
    raw = {**DEFAULTS, **own, **raw}
    if raw.get("use_bidirectional_attention") == "all":
        raise UnsupportedModelError("models whose tokens attend to later ones are not supported")
    count = int(raw["num_hidden_layers"])
    kinds = [*layer_types(raw, WINDOW_PERIOD)[:-1], "full_attention"]  # the last layer has no window
    is_full = [kind == "full_attention" for kind in kinds]
    dims, kv_heads = _heads(raw, is_full)
    window, shared = int(raw["sliding_window"]), int(raw.get("num_kv_shared_layers") or 0)
    ropes = raw.get("rope_parameters") or ROPES
    full = read_full_rope(raw, ropes["full_attention"], dims[is_full.index(True)])
    width, double = int(raw["intermediate_size"]), bool(raw.get("use_double_wide_mlp"))
    size = int(raw.get("hidden_size_per_layer_input") or 0)
    return decoder_from_hf(
        {**raw, "rope_parameters": None},
        name,
        activation=read_activation(raw["hidden_activation"]),
        attention_scale=1.0,
        qk_norm=True,
        value_norm=True,
        post_norms=True,
        layer_scales=True,
        embedding_scale=math.sqrt(int(raw["hidden_size"])),
        layer_window=tuple(None if full else window for full in is_full),
        ropes=(full, read_rope(raw, dict(ropes["sliding_attention"]), int(raw["head_dim"]))),
        layer_rope=tuple(int(not full) for full in is_full),
        layer_head_dim=dims if len(set(dims)) > 1 else (),
        head_dim=int(raw["head_dim"]) if len(set(dims)) > 1 else dims[0],
        layer_kv_heads=kv_heads if len(set(kv_heads)) > 1 else (),
        layer_mlp_size=tuple(width * (2 if i >= count - shared else 1) for i in range(count)) if double else (),
        kv_sources=kv_sources(kinds, shared),
        keys_as_values=_keys_as_values(is_full, shared) if raw.get("attention_k_eq_v") else (),
        layer_inputs=LayerInputConfig(size, int(raw["vocab_size_per_layer_input"])) if size else None,
        moe=_experts(raw) if raw.get("enable_moe_block") else None,
    )


def _heads(raw: Raw, is_full: list[bool]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The size of heads and the number of key/value heads of each layer."""
    dim, heads = int(raw["head_dim"]), int(raw["num_key_value_heads"])
    by_layer = raw.get("per_layer_config")
    if isinstance(by_layer, Mapping):
        own = [by_layer.get(str(layer), {}) for layer in range(len(is_full))]
        return tuple(int(x.get("head_dim", dim)) for x in own), tuple(
            int(x.get("num_key_value_heads", heads)) for x in own
        )
    full_heads = int(raw.get("num_global_key_value_heads") or heads) if raw.get("attention_k_eq_v") else heads
    full_dim = int(raw["global_head_dim"])
    return tuple(full_dim if full else dim for full in is_full), tuple(
        full_heads if full else heads for full in is_full
    )


def kv_sources(kinds: list[str], shared: int) -> tuple[int, ...]:
    """The last `shared` layers read the keys and values of the last layer of their kind before them."""
    first = len(kinds) - shared
    if not shared:
        return ()
    if first < 1 or not set(kinds[first:]) <= set(kinds[:first]):
        raise UnsupportedModelError(f"{shared} of {len(kinds)} layers find no layer whose keys and values they read")
    last = {kind: layer for layer, kind in enumerate(kinds[:first])}
    return tuple(layer if layer < first else last[kind] for layer, kind in enumerate(kinds))


def _keys_as_values(is_full: list[bool], shared: int) -> tuple[int, ...]:
    return tuple(layer for layer, full in enumerate(is_full) if full and layer < len(is_full) - shared)


def _experts(raw: Raw) -> MoeConfig:
    return MoeConfig(
        num_experts=int(raw["num_experts"]),
        top_k=int(raw["top_k_experts"]),
        expert_size=int(raw["moe_intermediate_size"]),
        renormalise=True,
        beside_mlp=True,
    )


def read_full_rope(raw: Raw, parameters: Raw, dim: int) -> RopeConfig:
    """The rope of layers without a window: the frequencies of whole heads, of which the last are not rotated."""
    if parameters.get("rope_type") != "proportional":
        return read_rope(raw, dict(parameters), dim)
    share = float(parameters.get("partial_rotary_factor", 1.0))
    if not 0 < dim <= MODEL_LIMITS["head_dim"] or not 0 <= share <= 1:  # before lists of so many entries are made
        raise ModelFileError(f"config.json has heads of {dim} dimensions of which {share} are rotated")
    turned = int(share * dim // 2)
    factors = (float(parameters.get("factor", 1.0)),) * turned + (STILL,) * (dim // 2 - turned)
    return RopeConfig(float(parameters["rope_theta"]), dim, "proportional", frequency_factors=factors)


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    full, local = config.ropes[0], config.ropes[-1]
    written = decoder_to_hf(config)
    del written["rope_theta"], written["rope_scaling"], written["hidden_act"]
    layer = written_layer_types(config).index("full_attention")
    inputs, moe = config.layer_inputs, config.moe
    experts = {} if moe is None else {
        "num_experts": moe.num_experts, "top_k_experts": moe.top_k, "moe_intermediate_size": moe.expert_size,
    }  # fmt: skip
    return {
        **written,
        **experts,
        "enable_moe_block": moe is not None,
        "hidden_activation": write_activation(config, "gelu_pytorch_tanh"),
        "sliding_window": largest_window(config),
        "layer_types": written_layer_types(config),
        "global_head_dim": config.head_size(layer),
        "num_global_key_value_heads": config.kv_heads(layer) if config.keys_as_values else None,
        "attention_bias": config.qkv_bias,
        "attention_k_eq_v": bool(config.keys_as_values),
        "num_kv_shared_layers": num_shared(config),
        "use_double_wide_mlp": bool(config.layer_mlp_size),
        "final_logit_softcapping": config.logit_softcap or None,
        "hidden_size_per_layer_input": 0 if inputs is None else inputs.size,
        "vocab_size_per_layer_input": config.vocab_size if inputs is None else inputs.vocab_size,
        "rope_parameters": {
            "full_attention": written_rope(full),
            "sliding_attention": {"rope_type": "default", "rope_theta": local.theta},
        },
    }


def written_rope(rope: RopeConfig) -> dict[str, Any]:
    if not rope.frequency_factors:
        return {"rope_type": "default", "rope_theta": rope.theta}
    turned = sum(factor < STILL / 2 for factor in rope.frequency_factors)
    return {
        "rope_type": "proportional",
        "rope_theta": rope.theta,
        "partial_rotary_factor": 2 * turned / rope.rotary_dim,
        **({"factor": rope.frequency_factors[0]} if rope.frequency_factors[0] != 1.0 else {}),
    }


def num_shared(config: ModelConfig) -> int:
    return sum(config.kv_source(layer) != layer for layer in range(config.num_layers))


# -- GGUF files -------------------------------------------------------------------------------------------------------
def config_from_gguf(file: GgufFile, metadata: Metadata, name: str) -> ModelConfig:
    count = metadata.count(".block_count")
    kv_heads = metadata.by_layer(".attention.head_count_kv", count)
    widths = metadata.by_layer(".feed_forward_length", count)
    full_dim = metadata.count(".attention.key_length")
    dim = metadata.count(".attention.key_length_swa", full_dim)
    pattern = metadata.array(".attention.sliding_window_pattern")
    if pattern is None or len(pattern) != count or pattern.all():
        raise metadata.fail("the metadata must say which layers have a sliding window, and one must have none")
    is_full = [not has_window for has_window in pattern.tolist()]
    dims = tuple(full_dim if full else dim for full in is_full)
    shared = metadata.count(".attention.shared_kv_layers", 0)
    size = metadata.count(".embedding_length_per_layer_input", 0)
    base = {".attention.head_count_kv": kv_heads[0], ".feed_forward_length": widths[0],
            ".attention.key_length": dim, ".attention.value_length": dim}  # fmt: skip
    own_values = [f"blk.{layer}.attn_v.weight" in file.entries for layer in range(count)]
    config = decoder_from_gguf(
        file,
        metadata.with_values(base),
        name,
        activation="gelu_tanh",
        attention_scale=1.0,
        qk_norm=True,
        value_norm=True,
        post_norms=True,
        layer_scales="blk.0.layer_output_scale.weight" in file.entries,
        embedding_scale=math.sqrt(metadata.count(".embedding_length")),
        layer_head_dim=dims if full_dim != dim else (),
        layer_kv_heads=kv_heads if len(set(kv_heads)) > 1 else (),
        layer_mlp_size=widths if len(set(widths)) > 1 else (),
        kv_sources=kv_sources(["full" if full else "window" for full in is_full], shared),
        keys_as_values=tuple(i for i in range(count - shared) if not own_values[i]),
        layer_inputs=LayerInputConfig(size, matrix_rows(file, "per_layer_token_embd.weight")) if size else None,
        moe=experts_from_gguf(file, metadata, renormalise=True, scale=1.0, beside_mlp=True),
    )
    full = config.ropes[0]
    if full.frequency_factors:
        full = replace(full, scaling="proportional")
    local = RopeConfig(
        metadata.number(".rope.freq_base_swa", 10000.0), metadata.count(".rope.dimension_count_swa", dim)
    )
    return replace(config, ropes=(full, local), layer_rope=tuple(int(not full) for full in is_full))


def gguf_entries(config: ModelConfig) -> dict[str, Value]:
    layers = range(config.num_layers)
    full = next(layer for layer in layers if config.window(layer) is None)
    size = config.head_size(full)
    inputs = config.layer_inputs
    entries: dict[str, Value] = {
        "attention.key_length": size,
        "attention.value_length": size,
        "attention.key_length_swa": config.head_dim,
        "attention.value_length_swa": config.head_dim,
        "rope.dimension_count": config.ropes[0].rotary_dim,
        "rope.dimension_count_swa": config.ropes[-1].rotary_dim,
        "attention.shared_kv_layers": num_shared(config),
        "attention.sliding_window_pattern": np.array([config.window(layer) is not None for layer in layers]),
        "embedding_length_per_layer_input": 0 if inputs is None else inputs.size,
        "final_logit_softcapping": config.logit_softcap,  # also 0: other programs assume 30
    }
    if config.layer_kv_heads:
        entries["attention.head_count_kv"] = np.array(config.layer_kv_heads, np.int32)
    if config.layer_mlp_size:
        entries["feed_forward_length"] = np.array(config.layer_mlp_size, np.int32)
    return entries


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


FAMILY = Family(
    name="gemma4",
    hf_types=("gemma4_text", "gemma4", f"{UNIFIED}_text", UNIFIED),
    hf_class="Gemma4ForCausalLM",
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
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
    written_as="gemma4",
    config_from_gguf=config_from_gguf,
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
    gguf_activation="gelu_tanh",
    gguf_entries=gguf_entries,
    gguf_scale=lambda config: 1.0,
)
