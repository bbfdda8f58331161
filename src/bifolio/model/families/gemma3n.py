"""Gemma 3n: parallel residual streams (AltUp) with low-rank residuals (LAuReL), inputs of each layer, sparse gates.

The last layers read the keys and values of earlier ones. Norms have no offset, and values are normed, as in Gemma 4.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import numpy as np

from bifolio.config import ModelConfig, RopeConfig
from bifolio.model.description import Reading, Writing
from bifolio.model.export import JoinedRows, NamedTensor
from bifolio.model.families.family import Family
from bifolio.model.families.gemma3 import ACTIVATION, EMBEDDING_SCALE, HF_NAMES, TANH
from bifolio.model.families.gemma4 import (
    INPUT_ROWS,
    MLP_SIZES,
    SHARED,
    WIDTH,
    mlp_sizes,
    pattern_to_gguf,
    shared_layers,
    where_different,
)
from bifolio.model.fields import REQUIRED, Field, Form, Key
from bifolio.model.gguf.rope_fields import local_rope, read_rope, rope_entries
from bifolio.model.huggingface.rope_fields import BY_KIND
from bifolio.model.stream_tensors import GGUF_LAYER_INPUTS, HF_LAYER_INPUTS, StreamNames
from bifolio.model.tensor_names import GGUF_LLAMA
from bifolio.model.window_fields import BY_TYPE, GGUF_WINDOWS
from bifolio.quant.tensor import QuantizedTensor

SPARSE_LAYERS, SPARSITY = 10, 0.95  # of models that do not say it
FILE_SHARED_FROM = 20  # layers with keys and values of their own in GGUF files that do not say it
SPARSE = "activation_sparsity_pattern"


# -- layers -----------------------------------------------------------------------------------------------------------
def widths_from_hf(values: Reading) -> tuple[int, ...]:
    if not isinstance(values.json.get(WIDTH), list | tuple):
        return (values.json.count(WIDTH),) * len(values.layers)
    return of_each_layer(values, values.json.counts(WIDTH), WIDTH)


def of_each_layer(values: Reading, found: tuple[Any, ...], key: str) -> tuple[Any, ...]:
    if len(found) != len(values.layers):
        raise values.json.wrong(key, f"a list for {len(values.layers)} layers, not for {len(found)},")
    return found


def cutoffs_from_hf(values: Reading) -> tuple[float | None, ...]:
    """The cutoff of a share of zeros, in standard deviations of normally distributed gates."""
    shares: Any = values.json.get(SPARSE)
    if shares is None:
        return usual_cutoffs(values)
    if not isinstance(shares, list | tuple):
        shares = [values.json.number(SPARSE)] * len(values.layers)
    shares = of_each_layer(values, values.json.with_values({SPARSE: shares}).numbers(SPARSE), SPARSE)
    if not all(0 <= share < 1 for share in shares):
        raise values.json.wrong(SPARSE, "a list of numbers from 0 to 1")
    return tuple(None if not share else round(NormalDist().inv_cdf(share), 7) for share in shares)


def usual_cutoffs(values: Reading) -> tuple[float | None, ...]:
    """Those of models that do not say it: sparse gates in the first layers."""
    if len(values.layers) <= SPARSE_LAYERS:
        return ()
    cutoff = round(NormalDist().inv_cdf(SPARSITY), 7)
    return tuple(cutoff if layer < SPARSE_LAYERS else None for layer in values.layers)


def cutoffs_from_gguf(values: Reading) -> tuple[float | None, ...]:
    found = values.header.array(".activation_sparsity_scale")
    if found is None or len(found) != len(values.layers):
        return usual_cutoffs(values)
    return tuple(round(float(value), 7) if math.isfinite(value) else None for value in found.tolist())


def cutoffs_to_gguf(values: Writing) -> dict[str, Any]:
    cutoffs = [-math.inf if cutoff is None else cutoff for cutoff in values["layers.cutoff"]]
    return {"activation_sparsity_scale": np.array(cutoffs, np.float32)}


def share(cutoff: float | None) -> float:
    return 0.0 if cutoff is None else round(NormalDist().cdf(cutoff), 6)


def ropes_from_gguf(values: Reading) -> tuple[RopeConfig, ...]:
    rope = read_rope(values)
    return rope, local_rope(values, rope.rotary_dim)


def shared_from_gguf(values: Reading) -> int:
    return values.header.count(".attention.shared_kv_layers", max(0, len(values.layers) - FILE_SHARED_FROM))


def check_scale(values: Writing) -> dict[str, Any]:
    if not values["streams.scales_output"]:
        raise values.refusal("corrected streams that are not scaled")
    return {}


# -- tensors ----------------------------------------------------------------------------------------------------------
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
    network={"attention_scale": 1.0, "qk_norm": True, "value_norm": True, "post_norms": True},
    fields=(
        ACTIVATION,
        EMBEDDING_SCALE,
        *MLP_SIZES,
        Field("logit_softcap", gguf=Key("final_logit_softcapping", default=30.0, optional=False)),
        Field("layers.window", hf=BY_TYPE, gguf=Form(GGUF_WINDOWS.read, pattern_to_gguf)),
        Field("ropes", hf=BY_KIND, gguf=Form(ropes_from_gguf, rope_entries)),
        Field("intermediate_size", hf=Form(lambda v: widths_from_hf(v)[0], lambda v: {WIDTH: mlp_sizes(v)})),
        Field("layers.mlp_size", hf=Form(lambda v: where_different(widths_from_hf(v)))),
        Field(
            "layers.cutoff",
            hf=Form(cutoffs_from_hf, lambda v: {SPARSE: [share(cutoff) for cutoff in v["layers.cutoff"]]}),
            gguf=Form(cutoffs_from_gguf, cutoffs_to_gguf),
        ),
        shared_layers(lambda v: v.json.count(SHARED, 0, least=0), shared_from_gguf),
        Field(
            "layer_inputs.size",
            hf="hidden_size_per_layer_input",
            gguf=Key("embedding_length_per_layer_input", default=256),
            default=REQUIRED,
        ),
        INPUT_ROWS,
        Field("streams.count", hf="altup_num_inputs", gguf=Key("altup.num_inputs", default=4), default=REQUIRED),
        Field("streams.active", hf="altup_active_idx", gguf="altup.active_idx"),
        Field("streams.low_rank", hf="laurel_rank", gguf=Form(lambda v: v.header.shape("blk.0.laurel_l.weight")[0])),
        Field("streams.scales_output", hf="altup_correct_scale", gguf=Form(lambda v: True, check_scale)),
    ),
    window_period=5,
    hf_types=("gemma3n_text", "gemma3n"),
    hf_class="Gemma3nForCausalLM",
    hf_defaults={"hidden_activation": TANH, "head_dim": 256, "sliding_window": 512, "final_logit_softcapping": 30.0,
                 "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144, "altup_num_inputs": 4,
                 SHARED: 15, "laurel_rank": 64, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0,
                 "max_position_embeddings": 32768, "tie_word_embeddings": True, "bos_token_id": 2, "eos_token_id": 1},
    hf_always=("attention_bias", "final_logit_softcapping"),
    hf_text_part=True,
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
    gguf_implied={"activation": "gelu_tanh"},
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
)  # fmt: skip
