"""The duration of a step as a function of its work, taken from a measured engine.

seconds = base + per prefill token + per pair of a prefill token and a token before it
               + per decoding sequence + per token of context that decodes read
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from bifolio.errors import ConfigError

if TYPE_CHECKING:
    from bifolio.engine.engine import InferenceEngine
    from bifolio.schedule.plan import StepPlan


class Work(NamedTuple):
    """The work of one step."""

    prefill_tokens: float = 0.0
    prefill_pairs: float = 0.0  # sum over prefill tokens of the tokens before each
    decodes: float = 0.0  # sequences that decode
    context_tokens: float = 0.0  # that they read


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds for each unit of work."""

    base: float
    prefill_token: float
    prefill_pair: float
    decode: float
    context_token: float

    def seconds(self, work: Work) -> float:
        return (
            self.base
            + self.prefill_token * work.prefill_tokens
            + self.prefill_pair * work.prefill_pairs
            + self.decode * work.decodes
            + self.context_token * work.context_tokens
        )

    def as_dict(self) -> dict[str, float]:
        return asdict(self)

    @classmethod
    def read(cls, path: Path) -> StepTimes:
        """The times that `python -m benchmarks fleet --measure` has written."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(f"{path} holds no step times: write one with --measure ({error})") from error

    def write(self, path: Path) -> None:
        path.write_bytes(msgspec.json.encode(self))

    @classmethod
    def fit(cls, steps: Sequence[tuple[Work, float]]) -> StepTimes:
        """Least squares over measured steps, by relative error; no coefficient is negative."""
        features = np.array([[1.0, *work] for work, _ in steps])
        seconds = np.array([value for _, value in steps])
        left, right = features / seconds[:, None], np.ones(len(steps))
        active = list(range(features.shape[1]))
        while True:  # drop the most negative coefficient until none is left
            found, *_ = np.linalg.lstsq(left[:, active], right, rcond=None)
            if (found >= 0).all() or len(active) == 1:
                break
            del active[int(np.argmin(found * np.abs(left[:, active]).max(axis=0)))]
        values = np.zeros(features.shape[1])
        values[active] = np.maximum(found, 0.0)
        return cls(*values.tolist())


# Llama-3.1-8B in bf16 on one H200 (docs/performance.md): 4.00 ms for one sequence, 8.5 ms for 64 at 2,048 tokens,
# 12.0 ms for 200 at 800 tokens, 42,430 input tokens/s in prompts of 2,048, 211 ms for a prompt of 8,192.
H200_8B = StepTimes(3.95e-3, 22.9e-6, 0.7e-9, 10e-6, 0.032e-6)
H200_8B_BYTES_PER_TOKEN = 2 * 32 * 8 * 128 * 2  # keys and values of 32 layers, 8 heads of 128, in bf16


def work_of(plan: StepPlan, grain: int = 1) -> Work:
    """The work of a planned step; `grain`: tokens that each planned token stands for."""
    tokens = pairs = context = 0.0
    for item in plan.prefills:
        new, start = item.num_new * grain, item.start * grain
        tokens += new
        pairs += new * (start + (new - 1) / 2)
    for item in plan.decodes:
        context += (item.start + 1) * grain
    return Work(tokens, pairs, float(len(plan.decodes)), context)


class Observed:
    """Records the work and the duration of an engine's steps, between its plan and the next one."""

    def __init__(self, engine: InferenceEngine) -> None:
        self.steps: list[tuple[Work, float]] = []
        self._engine = engine
        self._launch = engine.launch
        self._work: Work | None = None

    def __enter__(self) -> Observed:
        def launch(plan: StepPlan) -> Any:
            self._work = work_of(plan)
            return self._launch(plan)

        self._engine.launch = launch  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.launch = self._launch  # type: ignore[method-assign]

    def step(self) -> None:
        self._work = None
        began = time.perf_counter()
        self._engine.step()
        if self._work is not None:
            self.steps.append((self._work, time.perf_counter() - began))


def measure_steps(engine: InferenceEngine, repetitions: int = 3) -> list[tuple[Work, float]]:
    """Steps of a real engine: prompts of several lengths, then decodes of several batches and contexts."""
    from bifolio.measure.trace import exactly

    limit, slots = engine.config.max_model_len, engine.config.max_num_seqs
    vocab = engine.model.config.vocab_size
    found: list[tuple[Work, float]] = []
    for length in sorted({max(limit // 16, 8), limit // 4, limit // 2}):
        for batch in sorted({1, max(slots // 4, 1), slots}):
            for repetition in range(repetitions):
                for index in range(batch):
                    prompt = [(7 * index + 3 * position + repetition) % vocab for position in range(length)]
                    name = f"{length}-{batch}-{repetition}-{index}"
                    engine.add_request(name, prompt, exactly(12), salt=name.encode())
                with Observed(engine) as observed:
                    while engine.has_work:
                        observed.step()
                found += observed.steps if repetition else []  # the first one warms up
    return found
