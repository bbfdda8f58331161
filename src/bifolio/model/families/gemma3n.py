"""Gemma 3n: parallel residual streams (AltUp) with low-rank residuals (LAuReL), inputs of each layer, sparse gates.

The last layers read the keys and values of earlier ones. Norms have no offset, and values are normed, as in Gemma 4.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import numpy as np

from bifolio.config import LayerInputConfig, ModelConfig, RopeConfig, StreamConfig
from bifolio.errors import UnsupportedModelError
from bifolio.model.export import JoinedRows, NamedTensor
from bifolio.model.families.family import Family
from bifolio.model.families.gemma3 import HF_NAMES
from bifolio.model.families.gemma4 import kv_sources, num_shared
from bifolio.model.gguf.decoder_config import decoder_from_gguf, matrix_rows
from bifolio.model.gguf.entries import Metadata
from bifolio.model.gguf.reader import GgufFile, Value
from bifolio.model.huggingface.decoder_config import (
    Raw,
    decoder_from_hf,
    decoder_to_hf,
    largest_window,
    layer_types,
    read_activation,
    windows_by_type,
    write_activation,
    written_layer_types,
)
from bifolio.model.stream_tensors import GGUF_LAYER_INPUTS, HF_LAYER_INPUTS, StreamNames
from bifolio.model.tensor_names import GGUF_LLAMA
from bifolio.quant.tensor import QuantizedTensor

WINDOW_PERIOD = 5
SPARSE_LAYERS, SPARSITY = 10, 0.95  # of models that do not say it
FILE_SHARED_FROM = 20  # layers with keys and values of their own in GGUF files that do not say it
DEFAULTS = {"hidden_activation": "gelu_pytorch_tanh", "head_dim": 256, "sliding_window": 512,
            "final_logit_softcapping": 30.0, "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144,
            "altup_num_inputs": 4, "num_kv_shared_layers": 15, "laurel_rank": 64, "rope_theta": 1000000.0,
            "rope_local_base_freq": 10000.0, "max_position_embeddings": 32768, "tie_word_embeddings": True,
            "bos_token_id": 2, "eos_token_id": 1}  # fmt: skip


# -- folders ----------------------------------------------------------------------------------------------------------
def config_from_hf(raw: Raw, name: str) -> ModelConfig:
    if isinstance(raw.get("text_config"), Mapping):
        raw = raw["text_config"]  # a model of text, images and sounds
    raw = {**DEFAULTS, **raw}
    count, width = int(raw["num_hidden_layers"]), raw["intermediate_size"]
    widths = tuple(int(size) for size in width) if isinstance(width, list | tuple) else (int(width),) * count
    raw = {**raw, "intermediate_size": widths[0], "layer_types": layer_types(raw, WINDOW_PERIOD)}
    return decoder_from_hf(
        raw,
        name,
        activation=read_activation(raw["hidden_activation"]),
        attention_scale=1.0,
        qk_norm=True,
        value_norm=True,
        post_norms=True,
        embedding_scale=math.sqrt(int(raw["hidden_size"])),
        layer_window=windows_by_type(raw),
        layer_mlp_size=widths if len(set(widths)) > 1 else (),
        layer_cutoff=_cutoffs(raw, count),
        kv_sources=kv_sources(raw["layer_types"], int(raw["num_kv_shared_layers"])),
        layer_inputs=LayerInputConfig(int(raw["hidden_size_per_layer_input"]), int(raw["vocab_size_per_layer_input"])),
        streams=StreamConfig(
            count=int(raw["altup_num_inputs"]),
            active=int(raw.get("altup_active_idx") or 0),
            low_rank=int(raw["laurel_rank"]),
            scales_output=bool(raw.get("altup_correct_scale", True)),
        ),
    )


def _cutoffs(raw: Raw, count: int) -> tuple[float | None, ...]:
    """The cutoff of a share of zeros, in standard deviations of normally distributed gates."""
    shares = raw.get("activation_sparsity_pattern")
    if shares is None:
        return _usual_cutoffs(count)
    if isinstance(shares, int | float):
        shares = [shares] * count
    found = tuple(None if not share else round(NormalDist().inv_cdf(float(share)), 7) for share in shares)
    return found if any(cutoff is not None for cutoff in found) else ()


def _usual_cutoffs(count: int) -> tuple[float | None, ...]:
    """Those of models that do not say it: sparse gates in the first layers."""
    if count <= SPARSE_LAYERS:
        return ()
    return (round(NormalDist().inv_cdf(SPARSITY), 7),) * SPARSE_LAYERS + (None,) * (count - SPARSE_LAYERS)


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    inputs, streams = config.layer_inputs, config.streams
    if inputs is None or streams is None:
        raise UnsupportedModelError("a model of this family has parallel streams and inputs of each layer")
    layers = range(config.num_layers)
    written = decoder_to_hf(config)
    del written["rope_theta"], written["rope_scaling"], written["hidden_act"]
    return {
        **written,
        "intermediate_size": [config.mlp_size(layer) for layer in layers],
        "hidden_activation": write_activation(config, "gelu_pytorch_tanh"),
        "sliding_window": largest_window(config),
        "layer_types": written_layer_types(config),
        "attention_bias": config.qkv_bias,
        "num_kv_shared_layers": num_shared(config),
        "final_logit_softcapping": config.logit_softcap or None,
        "hidden_size_per_layer_input": inputs.size,
        "vocab_size_per_layer_input": inputs.vocab_size,
        "altup_num_inputs": streams.count,
        "altup_active_idx": streams.active,
        "altup_correct_scale": streams.scales_output,
        "laurel_rank": streams.low_rank,
        "activation_sparsity_pattern": [_share(config.cutoff(layer)) for layer in layers],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": config.ropes[0].theta},
            "sliding_attention": {"rope_type": "default", "rope_theta": config.ropes[-1].theta},
        },
    }


def _share(cutoff: float | None) -> float:
    return 0.0 if cutoff is None else round(NormalDist().cdf(cutoff), 6)


# -- GGUF files -------------------------------------------------------------------------------------------------------
def config_from_gguf(file: GgufFile, metadata: Metadata, name: str) -> ModelConfig:
    count = metadata.count(".block_count")
    widths = metadata.by_layer(".feed_forward_length", count)
    low_rank = file.entries.get("blk.0.laurel_l.weight")
    if low_rank is None:
        raise metadata.fail("the tensor 'blk.0.laurel_l.weight' is missing: fetch the whole model again")
    config = decoder_from_gguf(
        file,
        metadata.with_values({".feed_forward_length": widths[0]}),
        name,
        window_period=WINDOW_PERIOD,
        activation="gelu_tanh",
        attention_scale=1.0,
        logit_softcap=metadata.number(".final_logit_softcapping", 30.0),
        qk_norm=True,
        value_norm=True,
        post_norms=True,
        embedding_scale=math.sqrt(metadata.count(".embedding_length")),
        layer_mlp_size=widths if len(set(widths)) > 1 else (),
        layer_cutoff=_read_cutoffs(metadata, count),
        layer_inputs=LayerInputConfig(
            metadata.count(".embedding_length_per_layer_input", 256), matrix_rows(file, "per_layer_token_embd.weight")
        ),
        streams=StreamConfig(
            count=metadata.count(".altup.num_inputs", 4),
            active=metadata.count(".altup.active_idx", 0),
            low_rank=low_rank.shape[0],
        ),
    )
    rope = config.ropes[0]
    local = RopeConfig(metadata.number(".rope.freq_base_swa", 10000.0), rope.rotary_dim)
    shared = metadata.count(".attention.shared_kv_layers", max(0, count - FILE_SHARED_FROM))
    return replace(
        config,
        ropes=(rope, local),
        layer_rope=tuple(int(config.window(layer) is not None) for layer in range(count)),
        kv_sources=kv_sources(written_layer_types(config), shared),
    )


def _read_cutoffs(metadata: Metadata, count: int) -> tuple[float | None, ...]:
    values = metadata.array(".activation_sparsity_scale")
    if values is None or len(values) != count:
        return _usual_cutoffs(count)
    found = tuple(round(float(value), 7) if math.isfinite(value) else None for value in values.tolist())
    return found if any(cutoff is not None for cutoff in found) else ()


def gguf_entries(config: ModelConfig) -> dict[str, Value]:
    inputs, streams, layers = config.layer_inputs, config.streams, range(config.num_layers)
    if inputs is None or streams is None:
        raise UnsupportedModelError("a model of this family has parallel streams and inputs of each layer")
    if not streams.scales_output:
        raise UnsupportedModelError("GGUF cannot describe a model whose corrected streams are not scaled")
    cutoffs = [-math.inf if (cutoff := config.cutoff(layer)) is None else cutoff for layer in layers]
    entries: dict[str, Value] = {
        "altup.active_idx": streams.active,
        "altup.num_inputs": streams.count,
        "embedding_length_per_layer_input": inputs.size,
        "attention.shared_kv_layers": num_shared(config),
        "attention.sliding_window_pattern": np.array([config.window(layer) is not None for layer in layers]),
        "activation_sparsity_scale": np.array(cutoffs, np.float32),
    }
    if config.layer_mlp_size:
        entries["feed_forward_length"] = np.array(config.layer_mlp_size, np.int32)
    return entries


def with_unused_keys(tensors: Iterator[NamedTensor], config: ModelConfig) -> Iterator[NamedTensor]:
    """Add zeros for the keys and values of layers that read those of others: other programs expect the tensors."""
    zeros = QuantizedTensor.from_array(np.zeros((config.kv_size, config.hidden_size), np.float32))
    for tensor in tensors:
        yield tensor
        layer, _, name = tensor.name.removeprefix("blk.").partition(".")
        if name == "attn_q.weight" and config.kv_source(int(layer)) != int(layer):
            yield NamedTensor(f"blk.{layer}.attn_k.weight", zeros, "matrix")
            yield NamedTensor(f"blk.{layer}.attn_v.weight", zeros, "matrix")
            unused = QuantizedTensor.from_array(np.ones(config.head_dim, np.float32))
            yield NamedTensor(f"blk.{layer}.attn_k_norm.weight", unused, "state")


def padded_table(tensors: Iterator[NamedTensor], config: ModelConfig) -> Iterator[NamedTensor]:
    """Give the table of inputs of layers a row for each token: those past its last row read row 0."""
    for tensor in with_unused_keys(tensors, config):
        table, missing = tensor.tensor, config.vocab_size - tensor.tensor.shape[0]
        if tensor.name == f"{GGUF_LAYER_INPUTS.table}.weight" and missing > 0 and isinstance(table, QuantizedTensor):
            rows = np.arange(config.vocab_size, dtype=np.int64)
            parts = table, table.select_rows(np.zeros(missing, np.int64))
            tensor = replace(tensor, tensor=JoinedRows(parts, (rows[:-missing], rows[-missing:])))
        yield tensor


FAMILY = Family(
    name="gemma3n",
    hf_types=("gemma3n_text", "gemma3n"),
    hf_class="Gemma3nForCausalLM",
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    hf_names=replace(
        HF_NAMES,
        layer_inputs=HF_LAYER_INPUTS,
        streams=StreamNames(
            spread="model.altup_projections.{}",
            merge="model.altup_unembed_projections.{}",
            router_norm="altup.router_norm",
            router="altup.modality_router",
            predict="altup.prediction_coefs",
            correct="altup.correction_coefs",
            output_scale="altup.correct_output_scale",
            low_rank_down="laurel.linear_left",
            low_rank_up="laurel.linear_right",
            low_rank_norm="laurel.post_laurel_norm",
        ),
    ),
    gguf_architectures=("gemma3n",),
    written_as="gemma3n",
    config_from_gguf=config_from_gguf,
    gguf_names=replace(
        GGUF_LLAMA,
        layer_inputs=GGUF_LAYER_INPUTS,
        streams=StreamNames(
            spread="altup_proj",
            merge="altup_unembd_proj",
            router_norm="altup_router_norm",
            router="altup_router",
            predict="altup_predict_coef",
            correct="altup_correct_coef",
            output_scale="altup_correct_scale.weight",
            low_rank_down="laurel_l",
            low_rank_up="laurel_r",
            low_rank_norm="laurel_post_norm",
        ),
    ),
    gguf_tensors=padded_table,
    gguf_activation="gelu_tanh",
    gguf_entries=gguf_entries,
    gguf_scale=lambda config: 1.0,
)
