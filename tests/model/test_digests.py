"""Digests of models and of arithmetic: one changed byte, norm or setting gives another."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from bifolio.config import CacheConfig, EngineConfig
from bifolio.kernels.reference import ReferenceKernels
from bifolio.model.digests import model_digest, numerics, numerics_digest
from bifolio.model.loaded import LoadedModel
from bifolio.quant.tensor import QuantizedTensor
from helpers import tiny_loaded
from hybrid_models import tiny_hybrid

CONFIG = EngineConfig(CacheConfig(64, 4), 128, token_budget=64)


def with_flipped_byte(model: LoadedModel, place: int) -> LoadedModel:
    """The model with one byte of its embedding changed."""
    table = model.weights.embedding
    assert isinstance(table, QuantizedTensor)
    data = np.array(table.data)
    data.reshape(-1)[place] ^= 1
    return replace(model, weights=replace(model.weights, embedding=replace(table, data=data)))


def test_a_digest_is_repeatable_and_covers_every_byte() -> None:
    model = tiny_loaded()
    assert model_digest(model, whole=True) == model_digest(tiny_loaded(), whole=True)
    size = model.weights.embedding.nbytes
    digests = {model_digest(with_flipped_byte(model, place), whole=True) for place in (0, size // 3, size - 1)}
    assert len({*digests, model_digest(model, whole=True)}) == 4


def test_the_sampled_digest_differs_by_name_and_sees_the_ends() -> None:
    model = tiny_loaded()
    size = model.weights.embedding.nbytes
    assert model_digest(model).startswith("sampled-")
    assert len({model_digest(model), *(model_digest(with_flipped_byte(model, end)) for end in (0, size - 1))}) == 3


def test_norms_and_recurrences_are_covered() -> None:
    model = tiny_hybrid("mamba")
    norm = model.weights.final_norm
    changed = replace(model.weights, final_norm=replace(norm, weight=norm.weight + np.float32(1e-6)))
    layers = list(model.weights.layers)
    recurrent = layers[0].recurrent
    assert recurrent is not None
    decay = replace(recurrent.recurrence, decay=recurrent.recurrence.decay * np.float32(1.0001))
    layers[0] = replace(layers[0], recurrent=replace(recurrent, recurrence=decay))
    models = [
        model,
        replace(model, weights=changed),
        replace(model, weights=replace(model.weights, layers=tuple(layers))),
    ]
    assert len({model_digest(each) for each in models}) == len(models)
    assert model_digest(replace(model, config=replace(model.config, norm_eps=1e-4))) != model_digest(model)


def test_numerics_name_the_settings_that_decide_on_bits() -> None:
    model, kernels = tiny_loaded(), ReferenceKernels()
    facts = numerics(model, kernels, CONFIG)
    assert (facts["kernels"], facts["kv_dtype"], facts["ranks"]) == ("reference", "f32", 1)
    assert facts["deterministic"] is False  # the sums of numpy depend on the number of rows
    half = replace(CONFIG, cache=replace(CONFIG.cache, dtype="f16"))
    assert numerics_digest(model, kernels, CONFIG) == numerics_digest(model, kernels, replace(CONFIG, max_num_seqs=3))
    assert numerics_digest(model, kernels, CONFIG) != numerics_digest(model, kernels, half)
