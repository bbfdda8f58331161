"""The warm-up prepares everything that ordinary workloads launch: kernels are recorded instead of run.

A variant that the warm-up has not launched is compiled in the middle of requests, a graph that it has not captured is
captured there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))

from launch_record import Variant, recorded_launches

from benchmarks.shapes import decoder
from bifolio.config import RopeConfig
from bifolio.engine.engine import InferenceEngine
from bifolio.engine.warm_up import warm_up
from bifolio.kernels.triton import TritonKernels
from bifolio.kernels.triton.sampling import Mode
from bifolio.kernels.triton.step.decodes import StepKey
from bifolio.sampling_params import SamplingParams
from gpu_models import random_weights
from helpers import make_engine

VOCAB = 9000  # three chunks of logits
TOP_P = {"temperature": 0.8, "top_p": 0.95}
Recorded = tuple[InferenceEngine, set[Variant]]


@pytest.fixture(scope="module", params=["heads of 64", "heads of 128", "deterministic"])
def warm(request: pytest.FixtureRequest) -> Iterator[Recorded]:
    """An engine after its warm-up, and the variants launched so far; captured steps have run once."""
    size = 128 if request.param == "heads of 128" else 64
    shape = decoder("llama", VOCAB, 256, 2, 8, 2, size, 512, RopeConfig(1e4, size))
    with recorded_launches() as found:
        model = random_weights(shape, "cpu", "bf16")
        sizes = {"num_blocks": 6000, "block_size": 64, "max_model_len": 2048, "max_num_seqs": 256}
        options = {"token_budget": 8192, "chunk_size": 8192, "poison": False, "cache_dtype": "bf16"}
        kernels = TritonKernels("cpu", "bf16", deterministic=request.param == "deterministic")
        engine = make_engine(model, kernels=kernels, **sizes, **options)
        warm_up(engine)
        assert engine.slots.device is not None
        graphs: Any = engine.slots.device.graphs  # type: ignore[attr-defined]
        for step in graphs.passes(StepKey):
            step.run()  # on a GPU the capture of a step runs it
        yield engine, found


def tokens(rng: np.random.Generator, count: int) -> list[int]:
    return rng.integers(0, VOCAB, count).tolist()


def run(engine: InferenceEngine, prompts: list[list[int]], **options: Any) -> None:
    for number, prompt in enumerate(prompts):
        usual = {"temperature": 0.0, "max_tokens": 8 + number % 24, "ignore_eos": True, "detokenize": False}
        engine.add_request(f"request-{number}", prompt, SamplingParams(**{**usual, **options}))
    while engine.has_work:
        engine.step()


def many(engine: InferenceEngine, **options: Any) -> None:
    rng = np.random.default_rng(1)
    run(engine, [tokens(rng, int(rng.integers(100, 1024))) for _ in range(256)], **options)


def behind_a_prefix(engine: InferenceEngine) -> None:
    rng = np.random.default_rng(2)
    common = tokens(rng, 1024)
    run(engine, [common], max_tokens=1)
    run(engine, [common + tokens(rng, 64) for _ in range(64)])


WORKLOADS: dict[str, Callable[[InferenceEngine], None]] = {
    "256 requests, greedy": many,
    "256 requests, top-p": lambda engine: many(engine, **TOP_P),
    "16 prompts, n = 8": lambda engine: run(
        engine, [tokens(np.random.default_rng(i), 512) for i in range(16)], n=8, **TOP_P
    ),
    "64 prompts behind a prefix": behind_a_prefix,
    "one prompt": lambda engine: run(engine, [tokens(np.random.default_rng(3), 128)]),
    "temperature alone": lambda engine: many(engine, temperature=1.0),
    "penalties and logprobs": lambda engine: many(
        engine, **TOP_P, presence_penalty=0.5, frequency_penalty=0.2, logprobs=5
    ),
    "a bias": lambda engine: many(engine, logit_bias={5: 1.0}),
}
CAPTURED_LATER = ("temperature alone", "penalties and logprobs", "a bias")


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_meets_no_kernel_and_no_graph_that_is_new(name: str, warm: Recorded) -> None:
    engine, found = warm
    graphs: Any = engine.slots.device.graphs  # type: ignore[union-attr]
    variants, keys = set(found), graphs.keys(StepKey)
    WORKLOADS[name](engine)
    assert [f"{module}.{kernel}" for module, kernel, *_ in found - variants] == []
    new = graphs.keys(StepKey) - keys
    if name in CAPTURED_LATER:
        assert not {key.mode for key in new} & {Mode(), Mode("filter")}
    else:
        assert new == set()


def test_one_sequence_whose_draw_waits_for_a_mask_has_a_step_of_one_row(warm: Recorded) -> None:
    graphs: Any = warm[0].slots.device.graphs  # type: ignore[union-attr]
    assert StepKey(1, None) in graphs.keys(StepKey)


def test_a_new_variant_is_noticed(warm: Recorded) -> None:
    """Of the rules of the record: an integer that becomes 1, and an unaligned pointer."""
    import torch
    from launch_record import variant_of

    from bifolio.kernels.triton.sampling import _best_of_chunks_kernel

    values = torch.zeros(64)
    options = {"CHUNK": 64, "GROUP": 0, "num_warps": 4}
    usual = variant_of(_best_of_chunks_kernel, (values, values, values, values, 40, 3), options)
    assert usual == variant_of(_best_of_chunks_kernel, (values, values, values, values, 41, 5), options)
    assert usual != variant_of(_best_of_chunks_kernel, (values, values, values, values, 48, 3), options)
    assert usual != variant_of(_best_of_chunks_kernel, (values, values, values, values, 40, 1), options)
    assert usual != variant_of(_best_of_chunks_kernel, (values[1:], values, values, values, 40, 3), options)
    assert usual != variant_of(_best_of_chunks_kernel, (values, values, values, values, 40, 3), options | {"GROUP": 8})
