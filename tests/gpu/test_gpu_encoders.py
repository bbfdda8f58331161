"""Encoders on a GPU: vectors and scores are those of the CPU, and in deterministic mode the same bits in any batch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "encoders"))

from encoder_models import ENCODERS, TEXTS, encoder_model

from bifolio import LLM, PoolingParams
from bifolio.config import CacheConfig, EngineConfig
from bifolio.engine.device_memory import measure_step, move_to_device
from bifolio.model.huggingface.hf_loader import load_folder

NewKernels = Callable[..., Any]
ERRORS = {"f32": 2e-4, "f16": 1e-2, "bf16": 5e-2}  # of a token's hidden states, as a share of their length
SIZES = {"max_model_len": 60, "token_budget": 120, "max_num_seqs": 8, "num_blocks": 64, "block_size": 16}
RAW = PoolingParams(normalize=False)


def opened(name: str, kernels: Any, head: str = "", **options: Any) -> LLM:
    labels = {"num_labels": 1} if head else {}
    return LLM(encoder_model(name, head, **labels)[1], kernels=kernels, **{**SIZES, **options})


def token_vectors(llm: LLM, texts: Sequence[Any]) -> list[np.ndarray]:
    return [result.outputs.data for result in llm.encode(list(texts), RAW, use_tqdm=False)]


@pytest.fixture(params=ERRORS)
def dtype(request: pytest.FixtureRequest) -> str:
    if request.param == "bf16" and request.config.getoption("--device") == "interpret":
        pytest.skip("Triton's interpreter has no bf16")
    return str(request.param)


@pytest.mark.parametrize("name", ENCODERS)
def test_hidden_states_are_those_of_the_cpu(name: str, dtype: str, gpu_kernels: NewKernels) -> None:
    with opened(name, "reference") as cpu, opened(name, gpu_kernels(dtype), dtype=dtype) as gpu:
        for found, expected in zip(token_vectors(gpu, TEXTS), token_vectors(cpu, TEXTS), strict=True):
            assert np.linalg.norm(found - expected) < ERRORS[dtype] * np.linalg.norm(expected)
        vectors = [np.stack([each.outputs.data for each in llm.embed(list(TEXTS))]) for llm in (cpu, gpu)]
    assert np.abs(vectors[0] - vectors[1]).max() < ERRORS[dtype]


@pytest.mark.parametrize("name", ["bert", "mpnet", "modernbert"])
def test_scores_of_pairs_are_those_of_the_cpu(name: str, gpu_kernels: NewKernels) -> None:
    found = []
    for kernels in ("reference", gpu_kernels("f32")):
        with opened(name, kernels, "SequenceClassification") as llm:
            found.append([result.outputs.score for result in llm.score(TEXTS[0], list(TEXTS))])
    np.testing.assert_allclose(found[1], found[0], atol=2e-4)


@pytest.mark.usefixtures("own_kernels")
@pytest.mark.parametrize("name", ENCODERS)
def test_deterministic_vectors_have_the_same_bits_in_any_batch(name: str, dtype: str, gpu_kernels: NewKernels) -> None:
    """Alone, all together, in another order, and in steps of other sizes."""
    rng = np.random.default_rng(4)
    texts = [rng.integers(5, 60, length).tolist() for length in (1, 17, 60, 5, 40, 33)]
    options = {"deterministic": True, "dtype": dtype}
    with opened(name, gpu_kernels(dtype, deterministic=True), **options) as llm:
        alone = [llm.embed([text])[0].outputs.data.tobytes() for text in texts]
        together = [result.outputs.data.tobytes() for result in llm.embed(texts)]
        turned = [result.outputs.data.tobytes() for result in llm.embed(texts[::-1])][::-1]
    few = {**options, "token_budget": 60, "max_num_seqs": 2}
    with opened(name, gpu_kernels(dtype, deterministic=True), **few) as llm:
        smaller = [result.outputs.data.tobytes() for result in llm.embed(texts)]
    assert alone == together == turned == smaller


class Memory:
    """A device whose steps take 1,000 bytes."""

    def free_bytes(self) -> int:
        return 0

    def start_peak(self) -> None: ...

    def peak_bytes(self) -> int:
        return 1000


@pytest.mark.parametrize("head", ["", "SequenceClassification"])
@pytest.mark.parametrize("name", ENCODERS)
def test_the_largest_step_is_measured(name: str, head: str, gpu_kernels: NewKernels) -> None:
    """With a budget that is no multiple of the longest text."""
    kernels = gpu_kernels("f32")
    config = EngineConfig(CacheConfig(20, 4, "f32"), 60, 4, token_budget=100, chunk_size=100)
    model = move_to_device(load_folder(encoder_model(name, head)[1]), kernels)
    assert measure_step(model, kernels, config, Memory()) == 2000


def test_the_front_door_opens_an_encoder(device: str) -> None:
    """With all defaults: memory is planned by a measured step, and kernels are warmed up."""
    if not device.startswith("cuda"):
        pytest.skip("a device of its own plans memory")
    with LLM(encoder_model("bert")[1]) as cpu, LLM(encoder_model("bert")[1], device=device) as gpu:
        assert gpu.plan.step_bytes > 0
        vectors = [np.stack([each.outputs.data for each in llm.embed(list(TEXTS))]) for llm in (cpu, gpu)]
    assert np.abs(vectors[0] - vectors[1]).max() < ERRORS["bf16"]
