"""Profile of prefill and decode: time by part, compared with the machine's limits.

The engine first runs without timers, which gives the speed. Then it runs the same work with timers around every
operation of the network and every part of a step (`timed_kernels`), which gives the shares. Kernel sets that run a
whole step in one call are split into single operations for this, so the sum may be longer than the step; both are
reported.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from bifolio.engine.engine import InferenceEngine
from bifolio.engine.memory import default_threads
from bifolio.kernels.interface import KernelSet
from bifolio.measure.machine import READ_BYTES, MachineLimits, measure_limits
from bifolio.measure.part_clock import PartClock, PartTotals
from bifolio.measure.throughput import Test, add_random, bench_llm, measure, start_decoding, stop
from bifolio.measure.timed_kernels import TimedKernels
from bifolio.model.loaded import LoadedModel

VERB_PARTS = ("embedding", "norms", "projections", "attention", "MLP", "logits")
NETWORK_PARTS = (*VERB_PARTS, "dispatch")  # dispatch: Python between operations, absent in a recorded program
BOOKKEEPING = ("planning", "staging", "recording", "other")
PARTS = (*NETWORK_PARTS, "sampling", *BOOKKEEPING)
RUNS = 3  # the best is used, since other programs can only make a run slower
# The calls of a step outside the network: attribute of the engine -> method -> part.
HOOKS = {
    "batcher": {"evict_completed": "planning", "admit_pending": "planning", "active_slots": "planning"},
    "phases": {"plan": "planning"},
    "slots": {"update": "staging", "lay_out": "staging", "draw": "sampling"},
    "prefill_executor": {"run": "network"},
    "decode_executor": {"run": "network"},
    "postprocess": {"launched": "recording", "collect": "recording"},
}


@dataclass(slots=True)
class PhaseProfile:
    """One phase of the workload."""

    name: str
    num_tokens: int
    num_steps: int
    seconds: float  # of all timed steps
    speed: float  # tokens per second without timers
    parts: dict[str, PartTotals] = field(default_factory=dict)  # in the order of PARTS

    @property
    def flops(self) -> float:
        return sum(part.flops for part in self.parts.values())

    @property
    def integer_flops(self) -> float:
        return sum(part.integer_flops for part in self.parts.values())

    @property
    def num_bytes(self) -> float:
        return sum(part.num_bytes for part in self.parts.values())

    @property
    def plain_seconds(self) -> float:
        """Seconds of the same tokens without timers."""
        return self.num_tokens / self.speed

    @property
    def flops_per_second(self) -> float:
        return self.flops / self.plain_seconds

    @property
    def bytes_per_second(self) -> float:
        return self.num_bytes / self.plain_seconds

    def compute_share(self, limits: MachineLimits) -> float:
        """The shortest time that the arithmetic could take, over the time that it takes."""
        return limits.compute_seconds(self.flops, self.integer_flops) / self.plain_seconds

    def read_share(self, limits: MachineLimits) -> float:
        return self.bytes_per_second / limits.bytes_per_second

    def share(self, *names: str) -> float:
        return sum(self.parts[name].seconds for name in names) / self.seconds


@dataclass(slots=True)
class Profile:
    """Both phases of one workload, and the machine's limits."""

    model: str
    kernels: str
    threads: int
    batch: int
    num_prompt: int
    num_generated: int
    prefill: PhaseProfile
    decode: PhaseProfile
    limits: MachineLimits

    @property
    def phases(self) -> tuple[PhaseProfile, PhaseProfile]:
        return self.prefill, self.decode

    def as_dict(self) -> dict[str, Any]:
        limits = {
            "bytes_per_second": self.limits.bytes_per_second,
            "flops_per_second": self.limits.flops_per_second,
            "bytes_how": self.limits.bytes_how,
            "flops_how": self.limits.flops_how,
            "integer_ops_per_second": self.limits.integer_ops_per_second,
            "integer_how": self.limits.integer_how,
        }
        workload = {"batch": self.batch, "num_prompt": self.num_prompt, "num_generated": self.num_generated}
        head = {"model": self.model, "kernels": self.kernels, "threads": self.threads, **workload, "limits": limits}
        return {**head, **{phase.name: _phase_dict(phase, self.limits) for phase in self.phases}}


def profile_model(
    model: LoadedModel,
    kernels: KernelSet,
    *,
    num_prompt: int = 512,
    num_generated: int = 64,
    batch: int = 1,
    threads: int | None = None,
    limits: MachineLimits | None = None,
    **options: Any,
) -> Profile:
    """Process `batch` prompts of `num_prompt` tokens, then generate `num_generated` tokens after each."""
    threads = threads or default_threads()
    clock = PartClock(wait=_device_wait(kernels))
    timed = TimedKernels(kernels, clock)
    prefill, decode = Test(num_prompt=num_prompt, batch=batch), Test(0, num_generated, num_prompt, batch)
    engine = bench_llm(model, [prefill, decode], kernels=timed, **options).engine
    timed.attach(engine.runner.weights)
    hook_step(engine, clock)
    measure(engine, Test(num_prompt=min(num_prompt, 16)))  # warm up
    speeds = {test.name: max(measure(engine, test, seed) for seed in range(RUNS)) for test in (prefill, decode)}
    return Profile(
        model=str(model.path.name),
        kernels=kernels.name,
        threads=threads,
        batch=batch,
        num_prompt=num_prompt,
        num_generated=num_generated,
        prefill=_best(lambda: _time_prefill(engine, clock, prefill, speeds[prefill.name])),
        decode=_best(lambda: _time_decode(engine, clock, decode, speeds[decode.name])),
        limits=limits or _limits_of(kernels, threads),
    )


def _limits_of(kernels: KernelSet, threads: int) -> MachineLimits:
    return measure_limits(kernels.device, threads, READ_BYTES, kernels.activation_planes)


def _best(run: Callable[[], PhaseProfile]) -> PhaseProfile:
    return min((run() for _ in range(RUNS)), key=lambda phase: phase.seconds)


def _time_prefill(engine: InferenceEngine, clock: PartClock, test: Test, speed: float) -> PhaseProfile:
    """Time prefill with requests of one token, so that no step decodes."""
    requests = add_random(engine, test.batch, test.num_prompt, 1, seed=1)

    def busy() -> bool:
        return any(not request.is_finished for request in requests)

    return _timed_steps(engine, clock, "prefill", test.batch * test.num_prompt, speed, busy)


def _time_decode(engine: InferenceEngine, clock: PartClock, test: Test, speed: float) -> PhaseProfile:
    requests = start_decoding(engine, test, seed=1)
    left = iter(range(test.num_generated))
    num_tokens = test.batch * test.num_generated
    phase = _timed_steps(engine, clock, "decode", num_tokens, speed, lambda: next(left, None) is not None)
    stop(engine, requests)
    return phase


def _timed_steps(
    engine: InferenceEngine, clock: PartClock, name: str, num_tokens: int, speed: float, busy: Callable[[], bool]
) -> PhaseProfile:
    seconds, num_steps = 0.0, 0
    while busy():
        clock.phase = name
        begin = time.perf_counter()
        engine.step()
        seconds += time.perf_counter() - begin
        clock.phase = None
        num_steps += 1
    totals = clock.totals.pop(name)
    network = totals.pop("network").seconds
    totals["dispatch"].seconds = max(network - sum(totals[part].seconds for part in VERB_PARTS), 0.0)
    totals["other"].seconds = max(seconds - sum(part.seconds for part in totals.values()), 0.0)
    return PhaseProfile(name, num_tokens, num_steps, seconds, speed, {part: totals[part] for part in PARTS})


def _timed_method(clock: PartClock, part: str, method: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments, **options: clock.timed(part, partial(method, **options), *arguments)


def hook_step(engine: InferenceEngine, clock: PartClock) -> None:
    """Time the calls of this engine's step; other engines are unchanged."""
    for attribute, parts in HOOKS.items():
        owner: Any = getattr(engine, attribute)
        for name, part in parts.items():
            setattr(owner, name, _timed_method(clock, part, getattr(owner, name)))


def _device_wait(kernels: KernelSet) -> Callable[[], None] | None:
    if not kernels.device.startswith("cuda"):
        return None
    import torch

    return lambda: torch.cuda.synchronize(kernels.device)


def _phase_dict(phase: PhaseProfile, limits: MachineLimits) -> dict[str, Any]:
    return {
        "tokens_per_second": phase.speed,
        "num_tokens": phase.num_tokens,
        "num_steps": phase.num_steps,
        "timed_seconds": phase.seconds,
        "plain_seconds": phase.plain_seconds,
        "flops": phase.flops,
        "integer_flops": phase.integer_flops,
        "bytes": phase.num_bytes,
        "flops_per_second": phase.flops_per_second,
        "bytes_per_second": phase.bytes_per_second,
        "share_of_compute_limit": phase.compute_share(limits),
        "share_of_read_limit": phase.read_share(limits),
        "parts": {
            name: {"seconds": part.seconds, "share": phase.share(name), "flops": part.flops, "bytes": part.num_bytes}
            for name, part in phase.parts.items()
        },
    }
