"""Random lives of an engine with tiers that is closed, killed and started again: output equals that of a plain engine.

The machine of `test_engine_machine`, whose cache is small, with tiers in memory and files. Between two steps a process
may end: its files stay, and sometimes some of them are damaged.
"""

from __future__ import annotations

import random
import shutil
from functools import cache
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import invariant, precondition, rule
from test_engine_machine import MAX_MODEL_LEN, EngineMachine

from bifolio.config import TierSettings
from bifolio.engine.engine import InferenceEngine
from bifolio.engine.tiers.costs import Costs
from bifolio.sampling_params import SamplingParams
from helpers import cpu_kernel_names, fresh_folder, make_engine, make_kernels, output_ids, run_alone
from hybrid_models import tiny_hybrid

KERNELS = cpu_kernel_names()[0]


class AlwaysRead(Costs):
    """No measured time decides on a test."""

    def prefers_tier(self, num_tokens: int, num_bytes: int) -> bool:
        return True


def engine_with_tiers(**options: Any) -> InferenceEngine:
    engine = make_engine(kernels=make_kernels(KERNELS), **options)
    if engine.tiers is not None:
        engine.tiers.costs = AlwaysRead()
    return engine


@cache
def solo_native(prompt: tuple[int, ...], options: tuple[tuple[str, Any], ...]) -> tuple[list[list[int]], list[Any]]:
    params = SamplingParams(**dict(options))
    request = run_alone(prompt, params, max_model_len=MAX_MODEL_LEN, kernels=make_kernels(KERNELS))
    return output_ids(request), [sequence.finish_reason for sequence in request.sequences]


class TierMachine(EngineMachine):
    """Adds the end of a process, and waiting sequences that hold the blocks that arrived for them."""

    solo = staticmethod(solo_native)

    def new_engine(self, **options: Any) -> InferenceEngine:  # type: ignore[override]
        if not hasattr(self, "folder"):
            self.folder = fresh_folder("tier-machine")
            self.sizes = options
        options["enable_prefix_caching"] = True
        return engine_with_tiers(**options, tiers=TierSettings(memory_bytes=20_000, folder=self.folder))

    @precondition(lambda self: hasattr(self, "folder"))
    @rule(is_killed=st.booleans(), damage=st.integers(0, 3), seed=st.integers(0, 99))
    def restart(self, is_killed: bool, damage: int, seed: int) -> None:
        """End all requests with the process; files are cut as a crash of the machine may leave them."""
        assert self.engine.tiers is not None
        if is_killed:
            self.engine.tiers.copies.dropped_all()
        self.engine.abort_all()
        while self.engine.has_work:
            self.take(self.engine.step())
        self.aborted.update(self.requests)
        self.engine.close()
        found = sorted(path for path in self.folder.rglob("*") if path.is_file())
        for path in random.Random(seed).sample(found, min(damage, len(found))):
            path.write_bytes(path.read_bytes()[: path.stat().st_size - 1 - seed])
        self.engine = self.new_engine(**self.sizes)

    @invariant()
    def consistent(self) -> None:
        if not hasattr(self, "engine"):
            return
        batcher, blocks = self.engine.batcher, self.engine.blocks
        blocks.check_invariants()
        held = {slot.held.id for slot in batcher.active_slots()}
        waiting = {sequence.id for sequence in batcher.waiting_in_order()}
        assert set(blocks.sequence_ids()) <= held | waiting | self.own_tables()

    def own_tables(self) -> set[int]:
        """Tables of no sequence."""
        return set()

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "engine"):
            self.engine.close()
            shutil.rmtree(self.folder)


class HybridTierMachine(TierMachine):
    """The same lives with recurrent states."""

    solo = staticmethod(lambda prompt, options: solo_hybrid(prompt, options))

    def new_engine(self, **options: Any) -> InferenceEngine:  # type: ignore[override]
        return super().new_engine(**{**options, "model": tiny_hybrid("delta"), "speculative": None})


@cache
def solo_hybrid(prompt: tuple[int, ...], options: tuple[tuple[str, Any], ...]) -> tuple[list[list[int]], list[Any]]:
    engine = make_engine(
        tiny_hybrid("delta"), kernels=make_kernels(KERNELS), max_model_len=MAX_MODEL_LEN, chunk_size=512,
        token_budget=512,
    )  # fmt: skip
    request = engine.add_request("alone", prompt, SamplingParams(**dict(options)))
    while engine.has_work:
        engine.step()
    return output_ids(request), [sequence.finish_reason for sequence in request.sequences]


RUN = settings(
    max_examples=25,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    phases=(Phase.generate,),
    suppress_health_check=list(HealthCheck),
)
TestTierMachine = pytest.mark.full(TierMachine.TestCase)
TestTierMachine.settings = RUN
TestHybridTierMachine = pytest.mark.full(HybridTierMachine.TestCase)
TestHybridTierMachine.settings = RUN
