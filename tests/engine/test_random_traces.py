"""Short runs of the engine's random lives (`engine_traces`); `pytest -m slow` runs ten thousand."""

from __future__ import annotations

import pytest
from engine_traces import Trace

from bifolio import SamplingParams
from helpers import cpu_kernel_names, drain, kernels_of_long_runs, make_engine, random_prompt

KERNELS = [name for name in ("reference", "native") if name in cpu_kernel_names()]


def test_a_waiting_branch_gives_up_its_blocks_to_running_requests() -> None:
    """The branch of a dropped conversation holds blocks before it has a slot; the request ahead of it needs them."""
    engine = make_engine(block_size=2, num_blocks=15, max_model_len=24, max_num_seqs=2, enable_prefix_caching=False)
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    engine.add_request("first", random_prompt(10, seed=1, vocab_size=61), params)
    engine.keep("first")
    drain(engine)
    longer = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    running = engine.add_request("running", random_prompt(10, seed=2, vocab_size=61), longer)
    branch = engine.fork("first", "branch", [5, 6], params)
    drain(engine)
    assert running.error is None
    assert branch.error is None
    assert [len(request.sequences[0].output_token_ids) for request in (running, branch)] == [12, 4]
    assert engine.blocks.num_used_blocks == 0


@pytest.mark.full
@pytest.mark.parametrize("seed", [100229, 100334, 100875, 100910])  # livelocks until waiting branches gave up blocks
def test_traces_that_failed_once(seed: int) -> None:
    assert Trace(seed, KERNELS[-1]).run() == []


@pytest.mark.full
@pytest.mark.parametrize("kernels", kernels_of_long_runs(KERNELS))
@pytest.mark.parametrize("first", range(0, 24, 8))
def test_random_traces(first: int, kernels: str) -> None:
    for seed in range(first, first + 8):
        assert Trace(seed, kernels).run() == [], seed


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(1000, 11_000, 1000))
def test_ten_thousand_random_traces(first: int) -> None:
    for seed in range(first, first + 1000):
        assert Trace(seed, KERNELS[seed % len(KERNELS)]).run() == [], seed
