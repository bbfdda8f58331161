"""The stopwatch around kernels and steps: nothing is changed, everything is counted."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from family_rows import row_folder

from bifolio import LLM, SamplingParams
from bifolio.kernels.interface import AttentionPhase, AttentionSegment, KernelSet, TimedOperation
from bifolio.kernels.reference import ReferenceKernels
from bifolio.measure import machine
from bifolio.measure.machine import MachineLimits, measure_limits
from bifolio.measure.profiler import PARTS, CudaEvents, PhaseProfile, Profile, StepClock, profile_model
from bifolio.measure.random_models import SHAPES, random_model
from bifolio.measure.work import PartTotals, seen_pairs
from bifolio.model.huggingface.hf_loader import load_folder
from bifolio.model.loaded import LoadedModel
from helpers import cpu_kernel_names, drain, make_engine, make_kernels
from hybrid_models import tiny_hybrid

LIMITS = MachineLimits(1e10, 1e11, "given", "given")
PROMPT, GENERATED, BATCH = 24, 5, 2


@pytest.fixture(scope="module")
def profile() -> Profile:
    return profile_model(
        random_model("tiny"), ReferenceKernels(), num_prompt=PROMPT, num_generated=GENERATED, batch=BATCH,
        threads=1, limits=LIMITS, chunk_size=16,
    )  # fmt: skip


def test_parts_cover_the_whole_time_of_both_phases(profile: Profile) -> None:
    for phase in profile.phases:
        assert tuple(phase.parts) == PARTS
        assert sum(part.seconds for part in phase.parts.values()) == pytest.approx(phase.seconds, rel=1e-6)
        for name in PARTS:
            assert phase.parts[name].seconds > 0.0, name


def test_phases_are_apart(profile: Profile) -> None:
    assert (profile.prefill.num_tokens, profile.decode.num_tokens) == (PROMPT * BATCH, GENERATED * BATCH)
    assert profile.prefill.num_steps == 3  # 48 tokens, 16 a step
    assert profile.decode.num_steps == GENERATED


def test_arithmetic_and_traffic_are_those_of_the_shapes(profile: Profile) -> None:
    config = SHAPES["tiny"]
    d, layers = config.hidden_size, config.num_layers
    projections = layers * d * (2 * config.query_size + 2 * config.kv_size)
    mlp = layers * 3 * d * config.intermediate_size
    decode = profile.decode
    assert decode.parts["projections"].flops == 2 * projections * GENERATED * BATCH
    assert decode.parts["MLP"].flops == 2 * mlp * GENERATED * BATCH
    assert decode.parts["MLP"].num_bytes == 4 * mlp * GENERATED  # once a step, not once a sequence
    assert decode.parts["logits"].flops == 2 * d * config.vocab_size * GENERATED * BATCH
    prefill = profile.prefill
    assert prefill.parts["projections"].flops == 2 * projections * PROMPT * BATCH
    assert prefill.parts["logits"].flops == 2 * d * config.vocab_size * BATCH  # the last token of each prompt
    pairs = PROMPT * (PROMPT + 1) // 2 * BATCH
    assert prefill.parts["attention"].flops == 4 * layers * config.query_size * pairs


def test_speeds_and_rates_belong_together(profile: Profile) -> None:
    record = profile.as_dict()
    for phase in profile.phases:
        assert phase.speed > 0
        assert phase.flops_per_second == pytest.approx(phase.flops * phase.speed / phase.num_tokens)
        assert record[phase.name]["tokens_per_second"] == phase.speed
        assert sum(part["share"] for part in record[phase.name]["parts"].values()) == pytest.approx(1.0)


def test_arithmetic_is_held_against_the_limit_of_its_kind() -> None:
    limits = MachineLimits(1e10, 1e11, "given", "given", 4e11, "given")
    assert limits.compute_seconds(1e11, 0.0) == 1.0
    assert limits.compute_seconds(5e11, 4e11) == 2.0  # one second of floats, one of integers
    assert MachineLimits(1e10, 1e11, "given", "given").compute_seconds(2e11, 1e11) == 2.0  # all run as floats
    parts = {name: PartTotals() for name in PARTS}
    parts["MLP"] = PartTotals(1.0, flops=2e11, integer_flops=2e11)
    phase = PhaseProfile("prefill", 100, 1, 1.0, 100.0, parts)
    assert phase.flops_per_second / limits.flops_per_second == 2.0  # above the limit of floats, which is not its own
    assert phase.compute_share(limits) == pytest.approx(0.5)


@pytest.mark.parametrize(("format", "integers"), [("f32", False), ("q8_0", True), ("q4_0", True)])
def test_products_with_quantised_weights_count_as_integers(format: str, integers: bool) -> None:
    native = pytest.importorskip("bifolio.kernels._native", reason="the native kernels are not built")
    assert native
    from bifolio.kernels.native import NativeKernels

    limits = MachineLimits(1e10, 1e11, "given", "given", 4e11, "given")
    options: dict[str, Any] = {"num_prompt": 8, "num_generated": 2, "threads": 1, "limits": limits}
    profile = profile_model(random_model("tiny", format), NativeKernels(1), **options)
    for phase in profile.phases:
        linear = phase.parts["projections"].flops + phase.parts["MLP"].flops
        counted = phase.parts["projections"].integer_flops + phase.parts["MLP"].integer_flops
        assert counted == (linear if integers else 0.0)
        assert phase.parts["attention"].integer_flops == 0.0
    record = profile.as_dict()
    assert record["limits"]["integer_ops_per_second"] == 4e11
    assert record["decode"]["share_of_compute_limit"] == profile.decode.compute_share(limits)


def test_timing_does_not_change_tokens_and_reads_the_clock_of_the_program() -> None:
    calls: list[str] = []

    class Fused(ReferenceKernels):
        """Kernels with recorded programs."""

        def record(self, network: Any, phase: Any) -> Any:
            def run(batch: Any, storage: Any) -> Any:
                calls.append("run")
                return network.forward(ReferenceKernels(), batch, storage)

            def profile(batch: Any, storage: Any) -> Any:
                calls.append("profile")
                timed = [("linear", None, 2.0), ("attend", None, 1.0), ("norm", None, 0.5)]
                return network.forward(ReferenceKernels(), batch, storage), [TimedOperation(*each) for each in timed]

            return SimpleNamespace(run=run, profile=profile)

    clock = StepClock(Fused())
    llm = LLM(random_model("tiny"), kernels=clock.kernels, num_blocks=40, max_model_len=64)
    clock.attach(llm.engine)
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    plain = llm.generate([[1, 2, 3]], greedy)[0].outputs[0].token_ids
    assert set(calls) == {"run"}
    assert not clock.totals
    calls.clear()
    clock.phase = "any"
    assert llm.generate([[1, 2, 3]], greedy)[0].outputs[0].token_ids == plain
    assert calls == ["profile"] * 6
    found = clock.totals["any"]
    assert (found["logits"].seconds, found["attention"].seconds, found["norms"].seconds) == (12.0, 6.0, 3.0)
    assert set(found) >= {"projections", "MLP", "sampling", "planning", "network"}


@pytest.mark.parametrize("kernels", cpu_kernel_names())
def test_every_kernel_set_is_timed(kernels: str) -> None:
    """Recorded programs by their clock, the other sets call by call."""
    found = totals(random_model("tiny"), make_kernels(kernels))
    for part in ("embedding", "norms", "projections", "attention", "MLP", "logits"):
        assert found[part].seconds > 0.0, part


def totals(model: LoadedModel, kernels: KernelSet | None = None) -> dict[str, PartTotals]:
    """The totals of a run of three tokens."""
    clock = StepClock(kernels or ReferenceKernels())
    engine = make_engine(model, kernels=clock.kernels)
    clock.attach(engine)
    engine.add_request("any", [1, 2, 3], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    clock.phase = "any"
    drain(engine)
    clock.totals["any"].pop("network")
    return clock.totals["any"]


@pytest.mark.parametrize("kind", ["conv", "delta", "mamba", "wide conv"])
def test_products_of_recurrent_layers_are_projections(kind: str) -> None:
    model = tiny_hybrid(kind)
    found = totals(model)
    inputs = sum(0 if layer.recurrent is None else layer.recurrent.input.in_features for layer in model.weights.layers)
    assert found["logits"].flops == 2 * 3 * model.config.hidden_size * model.config.vocab_size  # the head alone
    assert found["projections"].flops > 2 * 5 * inputs * model.config.hidden_size
    assert set(found) <= set(PARTS)


@pytest.mark.full
@pytest.mark.parametrize("family", ["gemma3n", "gemma4 with experts", "qwen3next"])
def test_products_of_streams_inputs_and_routers_are_no_logits(family: str) -> None:
    model = load_folder(row_folder(family)[1])
    found = totals(model)
    assert found["logits"].flops == 2 * 3 * model.config.hidden_size * model.config.vocab_size
    assert set(found) <= set(PARTS)


def test_clock_books_time_only_while_it_runs() -> None:
    clock = StepClock(ReferenceKernels())
    clock.timed("nap", time.sleep, 0.001)
    assert not clock.totals
    clock.phase = "decode"
    clock.timed("nap", time.sleep, 0.01)
    assert clock.totals["decode"]["nap"].seconds >= 0.01


def test_operations_on_a_gpu_are_timed_by_events_that_are_read_when_their_work_is_done() -> None:
    log: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            log.append("record")

        def elapsed_time(self, other: object) -> float:
            assert "synchronize cuda:1" in log
            return 2.0  # milliseconds

    events = CudaEvents.__new__(CudaEvents)
    device = SimpleNamespace(Event=Event, synchronize=lambda name: log.append(f"synchronize {name}"))
    events._cuda, events._device, events._pairs = device, "cuda:1", []
    assert events.timed("MLP", lambda x, scale: log.append("call") or x * scale, 3, scale=2) == 6
    assert log == ["record", "call", "record"]
    assert events.collect() == [("MLP", 0.002)]
    assert events.collect() == []


@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_seen_pairs_are_those_of_a_mask(window: int | None) -> None:
    from bifolio.kernels.reference_attention import causal_mask

    lengths, contexts = [1, 4, 5], [7, 4, 9]
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    segment = AttentionSegment(AttentionPhase.PREFILL, 0, 10, starts, np.array(contexts, np.int32), None, False, 5, 9)
    masks = [causal_mask(n, length, window) for n, length in zip(lengths, contexts, strict=True)]
    assert seen_pairs(segment, window) == (
        sum(int(mask.sum()) for mask in masks),
        sum(int(mask.any(axis=0).sum()) for mask in masks),
    )


@pytest.mark.full
def test_limits_are_measured() -> None:
    limits = measure_limits("cpu", threads=2, read_bytes=1 << 20)
    assert limits.bytes_per_second > 1e6
    assert limits.flops_per_second > 1e6
    assert limits.ridge == limits.flops_per_second / limits.bytes_per_second


@pytest.mark.full
def test_the_integer_limit_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("bifolio.kernels._native", reason="the native kernels are not built")
    monkeypatch.setattr(machine, "RUNS", 1)
    monkeypatch.setattr(machine, "MATRIX_SIZE", 256)
    one = measure_limits("cpu", threads=1, read_bytes=1 << 20, activation_planes=1)
    two = measure_limits("cpu", threads=1, read_bytes=1 << 20, activation_planes=2)
    assert one.integer_ops_per_second is not None
    assert two.integer_ops_per_second is not None
    assert one.integer_ops_per_second > 1e6
    assert "in registers" in one.integer_how
    assert "2 for each weight" in two.integer_how
