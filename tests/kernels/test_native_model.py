"""Whole networks on the native kernels: every architecture against transformers, every format bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from native_support import isas, settings

from bifolio.engine.engine import InferenceEngine
from bifolio.engine.executor import ModelRunner
from bifolio.kernels import native
from bifolio.kernels.interface import Linear
from bifolio.model.huggingface.hf_loader import load_folder
from bifolio.model.loaded import LoadedModel
from bifolio.model.weights import prepare
from bifolio.quant.formats import ENCODABLE_FORMATS, QuantFormat
from bifolio.quant.tensor import QuantizedTensor
from bifolio.sampling_params import SamplingParams
from helpers import (
    ARCHITECTURES,
    drain,
    kv_storage,
    make_engine,
    make_runner,
    open_entry,
    output_ids,
    random_prompt,
    run_chunks,
    tiny_loaded,
    tiny_model,
    transformers_logits,
)

ISAS = isas()


class VerbByVerb(native.NativeKernels):
    """The same kernels without recorded programs."""

    def record(self, network: Any, phase: Any) -> None:  # type: ignore[override]
        return None


def in_format(model: LoadedModel, format: QuantFormat) -> LoadedModel:
    def converted(tensor: Any) -> Any:
        fits = isinstance(tensor, QuantizedTensor) and tensor.shape[-1] % format.block_elements == 0
        return tensor.converted(format) if fits else tensor

    def linear(value: Linear) -> Linear:
        return replace(value, parts=tuple(converted(part) for part in value.parts))

    weights = model.weights
    layers = tuple(
        replace(layer, qkv=linear(layer.qkv), output=linear(layer.output), up=linear(layer.up), down=linear(layer.down))
        for layer in weights.layers
    )
    weights = replace(weights, layers=layers, head=linear(weights.head), embedding=converted(weights.embedding))
    return replace(model, weights=weights)


@pytest.mark.full
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_architectures_give_transformers_logits(architecture: str) -> None:
    transformer, folder = tiny_model(architecture)
    prompt = random_prompt(13)
    expected = transformers_logits(transformer, prompt)
    results = []
    for kernels in (native.NativeKernels(), VerbByVerb()):
        runner, blocks = make_runner(load_folder(folder), kernels=kernels, poison=True)
        results += [run_chunks(runner, open_entry(runner, blocks), prompt, size) for size in (13, 5, 1)]
    assert np.abs(results[0] - expected).max() < 1e-4
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])


@pytest.mark.full
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", ENCODABLE_FORMATS)
@pytest.mark.parametrize("kv_dtype", ["f16", "bf16", "q8_0"])
def test_chunks_do_not_change_a_bit(isa: str, format: QuantFormat, kv_dtype: str) -> None:

    model = in_format(tiny_loaded(hidden_size=128, intermediate_size=96), format)
    prompt = random_prompt(40, vocab_size=61)
    with settings(isa, 2):
        runner, blocks = make_runner(model, kernels=native.NativeKernels())
        config = model.config
        storage = kv_storage(
            config.num_layers,
            64,
            4,
            config.num_kv_heads,
            config.head_dim,
            kv_dtype,
            poison=True,  # type: ignore[arg-type]
        )
        runner = ModelRunner(runner.weights, runner.kernels, storage)
        results = [run_chunks(runner, open_entry(runner, blocks), prompt, size) for size in (40, 1, 7)]
    assert np.isfinite(results[0]).all()
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])


@pytest.mark.full
@pytest.mark.parametrize("format", ENCODABLE_FORMATS)
def test_a_request_in_a_crowd_gets_the_same_tokens_and_logprobs(format: QuantFormat) -> None:
    model = in_format(tiny_loaded(hidden_size=64, intermediate_size=96), format)
    kernels = native.NativeKernels()
    needle = SamplingParams(temperature=0.9, seed=5, max_tokens=12, ignore_eos=True, logprobs=1)
    prompt = random_prompt(19, seed=42, vocab_size=61)

    def outcome(engine: InferenceEngine, others: int) -> tuple[Any, Any]:
        crowd = SamplingParams(temperature=1.0, seed=9, max_tokens=15, ignore_eos=True)
        for i in range(others):
            engine.add_request(f"other {i}", random_prompt(5 + 3 * i, seed=i, vocab_size=61), crowd)
        request = engine.add_request("needle", prompt, needle)
        drain(engine)
        return output_ids(request), [entry.logprob for entry in request.sequences[0].logprobs]

    alone = outcome(make_engine(model, kernels=kernels), 0)
    for others, chunk_size in ((3, 32), (7, 5)):
        assert outcome(make_engine(model, kernels=kernels, chunk_size=chunk_size), others) == alone


def test_weights_are_packed_once() -> None:
    kernels = native.NativeKernels()
    weights = prepare(tiny_loaded().weights, kernels)
    assert prepare(weights, kernels) is weights
    assert kernels.packed(weights.head) is weights.head.prepared
