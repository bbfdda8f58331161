"""Profile of prefill and decode: time by part, compared with the machine's limits.

The engine first runs without timers, which gives the speed. Then it runs the same work with timers around every part
of a step, which gives the shares. Operations of the network are timed by the program of the kernel set, if it records
one (`StepProgram.profile`), else around each call: by the host's clock, on a GPU by CUDA events.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from bifolio.engine.engine import InferenceEngine
from bifolio.engine.executor import ModelRunner
from bifolio.engine.memory import default_threads
from bifolio.kernels.interface import Array, Batch, KernelSet, StepProgram
from bifolio.kernels.operation_hook import hooked
from bifolio.measure.machine import READ_BYTES, MachineLimits, measure_limits
from bifolio.measure.throughput import Test, add_random, bench_llm, measure, start_decoding, stop
from bifolio.measure.work import PartTotals, PassWork, Totals, products_of
from bifolio.model.loaded import LoadedModel

VERB_PARTS = ("embedding", "norms", "projections", "attention", "MLP", "logits")
NETWORK_PARTS = (*VERB_PARTS, "dispatch")  # dispatch: a pass outside its operations
OPERATION_PARTS = {
    "embedding": ("embed", "adapt_embedding", "given", "tap"),
    "projections": ("head_linear", "all_gather", "all_reduce"),
    "attention": (
        "rotation",
        "rope_and_write",
        "attend",
        "recur",
        "join_latent",
        "choose",
        "attend_chosen",
        "turn_ends",
        "compress",
        "choose_entries",
        "attend_entries",
    ),
    "MLP": ("act", "act_mul", "gate", "route", "route_by_token", "take_identities", "mix_experts"),
    "logits": ("take", "logits"),
}  # products by their weights, all other operations: norms
PART_OF = {name: part for part, names in OPERATION_PARTS.items() for name in names}
BOOKKEEPING = ("planning", "staging", "recording", "other")
PARTS = (*NETWORK_PARTS, "sampling", *BOOKKEEPING)
RUNS = 3  # the best is used, since other programs can only make a run slower
# The calls of a step outside the network: attribute of the engine -> method -> part.
HOOKS = {
    "batcher": {"evict_completed": "planning", "admit_pending": "planning", "active_slots": "planning"},
    "phases": {"plan": "planning"},
    "slots": {"update": "staging", "lay_out": "staging", "draw": "sampling"},
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


class StepClock:
    """Times the parts of an engine's steps, by phase; stopped while `phase` is None."""

    def __init__(self, kernels: KernelSet) -> None:
        self.phase: str | None = None
        self.totals: dict[str, Totals] = defaultdict(lambda: defaultdict(PartTotals))
        self.kernels = hooked(kernels, self._operation)  # for the engine that is timed
        self._events = CudaEvents(kernels.device) if kernels.device.startswith("cuda") else None
        self._parts: dict[int, str] = {}  # id of a matrix, as it is or as it was prepared -> part; absent: the head

    def attach(self, engine: InferenceEngine) -> None:
        """Time the calls of this engine's step; other engines are unchanged."""
        engine.model.check_generates()
        for linear, part in products_of(engine.runner.weights):
            self._parts |= {id(each): part for each in (linear, linear.prepared) if each is not None}
        for attribute, parts in HOOKS.items():
            owner: Any = getattr(engine, attribute)
            for name, part in parts.items():
                setattr(owner, name, partial(self.timed, part, getattr(owner, name)))
        work = PassWork(engine.runner.weights, engine.runner.kernels, engine.runner.storage)
        for executor in (engine.prefill_executor, engine.decode_executor):
            vars(executor)["run"] = partial(self._network, executor, executor.run, work)

    def timed(self, part: str, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Run a call and add its time to the part; on a device, until its work is done."""
        if self.phase is None:
            return call(*arguments, **options)
        begin = time.perf_counter()
        result = call(*arguments, **options)
        if self._events is not None:
            for own, seconds in self._events.collect():
                self.totals[self.phase][own].seconds += seconds
        self.totals[self.phase][part].seconds += time.perf_counter() - begin
        return result

    def _network(self, executor: Any, run: Callable[[Batch], Array], work: PassWork, batch: Batch) -> Array:
        """A pass: replayed with the program's own clock, or operation by operation."""
        if self.phase is None:
            return run(batch)
        work.add_to(self.totals[self.phase], batch)
        program = executor.runner.program(executor.kind)
        return self.timed("network", run if program is None else partial(self._replay, program, executor.runner), batch)

    def _replay(self, program: StepProgram, runner: ModelRunner, batch: Batch) -> Array:
        result, operations = program.profile(batch, runner.storage)
        for operation in operations:
            part = self._part(operation.name, operation.weights)
            self.totals[self.phase or ""][part].seconds += operation.seconds
        return result

    def _operation(self, name: str, work: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        if self.phase is None:
            return work(*arguments, **options)
        part = self._part(name, arguments[1] if name == "linear" else None)
        if self._events is not None:
            return self._events.timed(part, work, *arguments, **options)
        return self.timed(part, work, *arguments, **options)

    def _part(self, name: str, weights: object) -> str:
        return self._parts.get(id(weights), "logits") if name == "linear" else PART_OF.get(name, "norms")


class CudaEvents:
    """Times calls by events on the device's stream, which the host reads when their work is done."""

    def __init__(self, device: str) -> None:
        import torch

        self._cuda: Any = torch.cuda
        self._device = device
        self._pairs: list[tuple[str, Any, Any]] = []

    def timed(self, part: str, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        begin, end = (self._cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        result = call(*arguments, **options)
        end.record()
        self._pairs.append((part, begin, end))
        return result

    def collect(self) -> list[tuple[str, float]]:
        """(part, seconds) of the calls since the last time."""
        self._cuda.synchronize(self._device)
        pairs, self._pairs = self._pairs, []
        return [(part, begin.elapsed_time(end) * 1e-3) for part, begin, end in pairs]


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
    clock = StepClock(kernels)
    prefill, decode = Test(num_prompt=num_prompt, batch=batch), Test(0, num_generated, num_prompt, batch)
    engine = bench_llm(model, [prefill, decode], kernels=clock.kernels, **options).engine
    clock.attach(engine)
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


def _time_prefill(engine: InferenceEngine, clock: StepClock, test: Test, speed: float) -> PhaseProfile:
    """Time prefill with requests of one token, so that no step decodes."""
    requests = add_random(engine, test.batch, test.num_prompt, 1, seed=1)

    def busy() -> bool:
        return any(not request.is_finished for request in requests)

    return _timed_steps(engine, clock, "prefill", test.batch * test.num_prompt, speed, busy)


def _time_decode(engine: InferenceEngine, clock: StepClock, test: Test, speed: float) -> PhaseProfile:
    requests = start_decoding(engine, test, seed=1)
    left = iter(range(test.num_generated))
    num_tokens = test.batch * test.num_generated
    phase = _timed_steps(engine, clock, "decode", num_tokens, speed, lambda: next(left, None) is not None)
    stop(engine, requests)
    return phase


def _timed_steps(
    engine: InferenceEngine, clock: StepClock, name: str, num_tokens: int, speed: float, busy: Callable[[], bool]
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
