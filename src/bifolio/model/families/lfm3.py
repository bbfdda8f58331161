"""LFM3: LFM2 with wider convolutions, windows in some of the layers with attention, and a gate on each of their heads.

Layers with and without a window have a rope each. Outputs of convolutions, attention and MLPs are normed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bifolio.config import ModelConfig, RopeConfig
from bifolio.errors import UnsupportedModelError
from bifolio.model.families import lfm2
from bifolio.model.families.family import Family
from bifolio.model.families.gemma4 import read_full_rope, written_rope
from bifolio.model.gguf.decoder_config import in_any_layer
from bifolio.model.gguf.entries import Metadata
from bifolio.model.gguf.reader import GgufFile, Value
from bifolio.model.huggingface.decoder_config import Raw, kinds_of_layers, largest_window
from bifolio.model.model_file import TensorSource
from bifolio.model.stored_form import StoredForm

CONV, FULL, LOCAL = "conv", "full_attention", "sliding_attention"
GATE, OWN_GATE = "self_attn.gate_proj", "self_attn.g_proj"
ROPES = {
    LOCAL: {"rope_type": "default", "rope_theta": 10000.0},
    FULL: {"rope_type": "proportional", "rope_theta": lfm2.THETA, "partial_rotary_factor": 0.5},
}
DEFAULTS = {"conv_L_cache": 7, "head_dim": 128, "num_key_value_heads": 4, "sliding_window": 256, "norm_eps": 1e-5,
            "use_sandwich_norm": True, "use_attention_gate": True, "bos_token_id": 124894,
            "eos_token_id": 124900}  # fmt: skip


# -- folders ----------------------------------------------------------------------------------------------------------
def config_from_hf(raw: Raw, name: str) -> ModelConfig:
    raw = {**DEFAULTS, **raw}
    kinds = _layer_kinds(raw)
    if LOCAL in kinds and not raw["sliding_window"]:
        raise UnsupportedModelError("an LFM3 model with sliding attention must say how long its window is")
    found = [kind for kind in (FULL, LOCAL) if kind in kinds]
    parameters = raw.get("rope_scaling") or raw.get("rope_parameters") or ROPES
    window = [int(raw["sliding_window"]) if kind == LOCAL else None for kind in kinds]
    return lfm2.hybrid_from_hf(
        {**raw, "layer_types": kinds, "hidden_act": "silu", "rope_parameters": None, "rope_scaling": None},
        name,
        intermediate_size=int(raw["intermediate_size"]),
        post_norms=bool(raw["use_sandwich_norm"]),
        attention_gate=bool(raw["use_attention_gate"]),
        gate_by_head=bool(raw["use_attention_gate"]),
        layer_window=tuple(window) if LOCAL in found else (),
        ropes=tuple(_rope_from_hf(raw, parameters[kind]) for kind in found),
        layer_rope=tuple(int(kind == LOCAL) for kind in kinds) if len(found) > 1 else (),
    )


def _layer_kinds(raw: Raw) -> list[str]:
    if raw.get("layer_types") is None:
        count = int(raw["num_hidden_layers"])
        return [FULL if n % 4 == 2 else LOCAL if n % 4 == 0 and n else CONV for n in range(count)]
    kinds = kinds_of_layers(raw, raw["layer_types"])
    for kind in kinds:
        if kind not in (CONV, FULL, LOCAL):
            raise UnsupportedModelError(f"LFM3 layers of the kind {kind!r} are not supported")
    return kinds


def _rope_from_hf(raw: Raw, parameters: Raw) -> RopeConfig:
    """Proportional, or the plain one of whole heads."""
    kind, dim = parameters.get("rope_type", parameters.get("type", "default")), int(raw["head_dim"])
    theta = parameters.get("rope_theta") or raw.get("rope_theta") or lfm2.THETA
    if kind == "default":
        return RopeConfig(float(theta), dim)
    if kind != "proportional":
        raise UnsupportedModelError(f"rope scaling {kind!r} is not supported in LFM3; supported: proportional")
    share = raw.get("partial_rotary_factor", 1.0)
    own = {"partial_rotary_factor": share, **parameters, "rope_type": kind, "rope_theta": theta}
    return read_full_rope(raw, own, dim)


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    fields = lfm2.hybrid_to_hf(config)
    del fields["rope_theta"], fields["rope_scaling"], fields["hidden_act"]
    layers = range(config.num_layers)
    kinds = [CONV if n not in config.attention_layers else LOCAL if config.window(n) else FULL for n in layers]
    ropes = {kinds[layer]: config.ropes[config.rope_index(layer) or 0] for layer in config.attention_layers}
    return {
        **fields,
        "attention_bias": config.qkv_bias,
        "layer_types": kinds,
        "sliding_window": largest_window(config),
        "rope_parameters": {kind: written_rope(rope) for kind, rope in ropes.items()},
        "use_sandwich_norm": config.post_norms,
        "use_attention_gate": config.attention_gate,
        "pad_token_id": None,  # the default lies outside of small vocabularies
    }


def folder_source(source: TensorSource, config: ModelConfig) -> TensorSource:
    """Gates under the name that folders have, or that of the class of transformers."""
    layer = config.attention_layers[0]
    if not source.has(f"model.layers.{layer}.{OWN_GATE}.weight"):
        return source
    return StoredForm(renamed=((f"{GATE}.weight", f"{OWN_GATE}.weight"),)).source(source)


# -- GGUF files -------------------------------------------------------------------------------------------------------
def config_from_gguf(file: GgufFile, metadata: Metadata, name: str) -> ModelConfig:
    count = metadata.count(".block_count")
    has_gates = in_any_layer(file, count, "attn_gate.weight")
    config = lfm2.hybrid_from_gguf(
        file,
        metadata,
        name,
        post_norms=in_any_layer(file, count, "post_attention_norm.weight"),
        attention_gate=has_gates,
        gate_by_head=has_gates,
    )
    first = config.ropes[0]
    ropes = (replace(first, scaling="proportional") if first.frequency_factors else first,)
    if not metadata.has(".rope.freq_base_swa"):
        return replace(config, ropes=ropes)
    local = RopeConfig(metadata.number(".rope.freq_base_swa", 0.0), config.head_dim)
    layer_rope = tuple(int(config.window(layer) is not None) for layer in range(count))
    return replace(config, ropes=(*ropes, local), layer_rope=layer_rope)


def gguf_entries(config: ModelConfig) -> dict[str, Value]:
    if any(rope.frequency_factors for rope in config.ropes[1:]):
        raise UnsupportedModelError("GGUF describes LFM3 with a plain rope in the layers with a window only")
    return lfm2.gguf_entries(config)


FAMILY = Family(
    name="lfm3",
    hf_types=("lfm3",),
    hf_class="Lfm3ForCausalLM",
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    hf_names=replace(
        lfm2.HF_NAMES,
        output="self_attn.o_proj",
        query_norm="self_attn.q_norm",
        key_norm="self_attn.k_norm",
        gate=GATE,
        post_attention_norm="post_operator_norm",
        post_mlp_norm="post_ffn_norm",
    ),
    folder_source=folder_source,
    gguf_architectures=("lfm3",),
    written_as="lfm3",
    config_from_gguf=config_from_gguf,
    gguf_names=replace(lfm2.GGUF_NAMES, gate="attn_gate"),
    gguf_entries=gguf_entries,
)
