"""The workloads of rows: requests, the measured figure, and the least work that any engine has to do for it.

Every pass draws prompts of its own, so that no prefix cache helps unless the row is about one. Speed of decoding is the
difference of two calls that continue the same cached prompts, with many tokens and with one:

    prompts     generate(prompts, 1)                    their keys and values are stored
    one         generate(prompts, 1)       |<- s1 ->|
    many        generate(prompts, 1 + n)   |<- s1 ->|<-------- n decode steps -------->|

This module is imported in the processes of other engines: it needs the standard library alone.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

from benchmarks.engines import Ask, Call, Done, Engine

Clock = Callable[[], float]
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}
TOP_P = {"temperature": 0.8, "top_p": 0.95}
SCORED = {**TOP_P, "presence_penalty": 0.5, "frequency_penalty": 0.2, "logprobs": 5}
MIXED: tuple[dict[str, Any], ...] = (
    {}, TOP_P, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 40}, SCORED, {"temperature": 0.7, "min_p": 0.05},
    {"logprobs": 2}, {**TOP_P, "repetition_penalty": 1.1},
)  # fmt: skip
SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string"},
        "year": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "text": {"type": "string"},
    },
    "required": ["title", "year", "tags", "text"],
    "additionalProperties": False,
}
HIGHER = {"tok/s", "input tok/s", "times", "% filled", "% saved"}  # units of which more is better
ATTEMPTS = 5  # of a difference of times that other programs may turn around
TINY = {"count": 3, "length": 24, "context": 24, "new": 5, "least": 4, "most": 12, "cached": 32, "prefix": 32,
        "own": 8, "repeats": 1, "history": 40}  # fmt: skip


class NoiseError(RuntimeError):
    """Other programs disturbed a measurement so much that it has no result."""


@dataclass(frozen=True)
class Decodes:
    """Steps in which `sequences` read their contexts."""

    sequences: int
    context: float  # tokens that each reads, on average; those of a common prefix are not counted
    steps: float
    prefix: int = 0  # tokens that all read together


@dataclass(frozen=True)
class Need:
    """The least work of a figure: prompts that are computed (cached tokens, new tokens), and decode steps."""

    prompts: Sequence[tuple[int, int]] = ()
    decodes: Sequence[Decodes] = ()


@dataclass
class Trial:
    """One pass of a workload on an open engine."""

    engine: Engine
    seed: int
    clock: Clock = time.perf_counter
    details: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.draws = random.Random(self.seed)

    def tokens(self, count: int) -> list[int]:
        return [self.draws.randrange(4, self.engine.vocab_size) for _ in range(count)]

    def timed(self, asks: Sequence[Ask]) -> tuple[float, Done]:
        """Seconds of one call."""
        call: Call = self.engine.prepare(asks)
        start = self.clock()
        done = call()
        seconds = self.clock() - start
        self.details.update(done.details)
        return done.seconds if done.seconds is not None else seconds, done

    def rate(self, asks: Sequence[Ask]) -> float:
        """Generated tokens per second of one call."""
        seconds, done = self.timed(asks)
        return done.num_tokens / seconds


def median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


@dataclass(frozen=True)
class Workload:
    """One kind of row."""

    title: str
    unit: str
    fresh: ClassVar[bool] = False  # measured from the start of a process

    @property
    def higher_is_better(self) -> bool:
        return self.unit in HIGHER

    def run(self, trial: Trial) -> float:
        raise NotImplementedError

    def need(self) -> Need:
        return Need()

    def tiny(self) -> Workload:
        """The same with few short requests, to run its code."""
        small = {f.name: min(getattr(self, f.name), TINY[f.name]) for f in fields(self) if f.name in TINY}
        return replace(self, **small)


@dataclass(frozen=True)
class Prompts(Workload):
    """Prompts that are computed, with one new token each: seconds of the call, or prompt tokens per second."""

    count: int = 1
    length: int = 512
    cached: int = 0  # tokens in the cache before
    repeats: int = 1

    def run(self, trial: Trial) -> float:
        trial.engine.reserve(self.count, self.cached + self.length + 1)
        return median([self._once(trial) for _ in range(self.repeats)])

    def _once(self, trial: Trial) -> float:
        before = trial.tokens(self.cached)
        if before:
            trial.timed([Ask(before, 1)])
        seconds, _ = trial.timed([Ask(before + trial.tokens(self.length), 1) for _ in range(self.count)])
        return self.count * self.length / seconds if self.higher_is_better else 1e3 * seconds

    def need(self) -> Need:
        return Need(prompts=[(self.cached, self.length)] * self.count)


@dataclass(frozen=True)
class Decode(Workload):
    """Sequences of one length that decode together: tokens per second, or ms for a token of one sequence."""

    count: int = 1
    context: int = 64
    new: int = 64
    repeats: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    adapters: int = 0  # different low-rank ones, of the sequences in turn

    def run(self, trial: Trial) -> float:
        trial.engine.reserve(self.count, self.context + self.new + 1)
        prompts = [trial.tokens(self.context) for _ in range(self.count)]
        trial.timed(self._asks(prompts, 1))
        return median([self._once(trial, prompts) for _ in range(self.repeats)])

    def _asks(self, prompts: list[list[int]], new: int) -> list[Ask]:
        return [
            Ask(prompt, new, self.options | ({"adapter": number % self.adapters} if self.adapters else {}))
            for number, prompt in enumerate(prompts)
        ]

    def _once(self, trial: Trial, prompts: list[list[int]]) -> float:
        for _ in range(ATTEMPTS):
            one, _ = trial.timed(self._asks(prompts, 1))
            many, done = trial.timed(self._asks(prompts, 1 + self.new))
            if many > one:
                break
        else:
            raise NoiseError(
                f"{1 + self.new} tokens took no longer than one, {ATTEMPTS} times: the machine is too busy"
            )
        seconds = many - one
        return (done.num_tokens - self.count) / seconds if self.higher_is_better else 1e3 * seconds / self.new

    def need(self) -> Need:
        return Need(decodes=[Decodes(self.count, self.context + self.new / 2, self.new)])


@dataclass(frozen=True)
class Crowd(Workload):
    """Requests of mixed lengths, all sent at once: output tokens per second."""

    count: int = 256
    least: int = 100
    most: int = 1024  # tokens of a prompt, and of an answer
    options: tuple[dict[str, Any], ...] = ({},)  # of the requests, one after the other

    def run(self, trial: Trial) -> float:
        trial.engine.reserve(self.count, 2 * self.most)
        asks = [
            Ask(trial.tokens(length), new, self.options[number % len(self.options)])
            for number, (length, new) in enumerate(self._lengths(trial.draws))
        ]
        return trial.rate(asks)

    def _lengths(self, draws: random.Random) -> list[tuple[int, int]]:
        return [(draws.randint(self.least, self.most), draws.randint(self.least, self.most)) for _ in range(self.count)]

    def need(self) -> Need:
        lengths = self._lengths(random.Random(0))
        steps = []
        for step in range(max(new for _, new in lengths)):
            running = [length + step for length, new in lengths if new > step]
            steps.append(Decodes(len(running), sum(running) / len(running), 1))
        return Need(prompts=[(0, length) for length, _ in lengths], decodes=steps)


@dataclass(frozen=True)
class Streams(Workload):
    """Equal requests that are sent at once: output tokens per second."""

    count: int = 16
    length: int = 32
    new: int = 200

    def run(self, trial: Trial) -> float:
        trial.engine.reserve(self.count, self.length + self.new)
        return trial.rate([Ask(trial.tokens(self.length), self.new) for _ in range(self.count)])

    def need(self) -> Need:
        decodes = [Decodes(self.count, self.length + self.new / 2, self.new)]
        return Need([(0, self.length)] * self.count, decodes)


@dataclass(frozen=True)
class Samples(Workload):
    """Several completions of each prompt (n), or beams: output tokens per second, prompts included."""

    count: int = 16
    length: int = 512
    new: int = 256
    width: int = 4
    options: dict[str, Any] = field(default_factory=lambda: dict(TOP_P))
    is_beam: bool = False

    def run(self, trial: Trial) -> float:
        trial.engine.reserve(self.count * self.width, self.length + self.new)
        options = {"beams": self.width} if self.is_beam else {**self.options, "n": self.width}
        seconds, done = trial.timed([Ask(trial.tokens(self.length), self.new, options) for _ in range(self.count)])
        return seconds if self.unit == "s" else done.num_tokens / seconds

    def need(self) -> Need:
        decodes = [Decodes(self.count * self.width, self.length + self.new / 2, self.new)]
        return Need([(0, self.length)] * self.count, decodes)


@dataclass(frozen=True)
class Prefixed(Workload):
    """Requests that begin with the same tokens, which were computed before: output tokens per second."""

    count: int = 64
    prefix: int = 4096
    own: int = 64
    new: int = 256

    def run(self, trial: Trial) -> float:
        trial.engine.reserve(self.count, self.prefix + self.own + self.new)
        common = trial.tokens(self.prefix)
        trial.timed([Ask(common, 1)])
        return trial.rate([Ask(common + trial.tokens(self.own), self.new) for _ in range(self.count)])

    def need(self) -> Need:
        decodes = [Decodes(self.count, self.own + self.new / 2, self.new, self.prefix)]
        return Need([(self.prefix, self.own)] * self.count, decodes)


@dataclass(frozen=True)
class Turns(Workload):
    """The next turn of a conversation: ms to its first token. Edited: the first half of the last answer is left out."""

    history: int = 4000
    edited: bool = False
    answer: int = 32
    message: int = 64

    def run(self, trial: Trial) -> float:
        trial.engine.reserve(1, self.history + self.answer + self.message + 1)
        first = trial.tokens(self.history)
        _, done = trial.timed([Ask(first, self.answer)])
        kept = done.outputs[0][self.answer // 2 if self.edited else 0 :]
        seconds, _ = trial.timed([Ask(first + kept + trial.tokens(self.message), 1)])
        return 1e3 * seconds


@dataclass(frozen=True)
class Start(Workload):
    """A process that opens the model and answers one request: seconds from its start, or its peak memory."""

    fresh: ClassVar[bool] = True
    cold: bool = False  # without compiled kernels of an earlier start

    def run(self, trial: Trial) -> float:
        trial.engine.reserve(1, 512)
        trial.timed([Ask(trial.tokens(16), 1)])
        return 0.0  # the worker and the runner read the clock and the memory
