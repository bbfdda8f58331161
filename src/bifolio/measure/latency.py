"""Latency of one batch of equal requests: to the first tokens, between tokens, and in total."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from bifolio.engine.engine import InferenceEngine
from bifolio.measure.statistics import Distribution
from bifolio.measure.throughput import WARM_UP_TOKENS, add_random, run_until_done
from bifolio.measure.trace import Recording


@dataclass(frozen=True, slots=True)
class LatencyReport:
    """Seconds over all repetitions."""

    batch: int
    num_prompt: int
    num_output: int
    whole: Distribution  # from the first request to the last token of the batch
    first_token: Distribution
    between_tokens: Distribution
    whole_samples: tuple[float, ...] = ()
    first_token_samples: tuple[float, ...] = ()
    between_samples: tuple[float, ...] = ()

    def as_dict(self) -> dict[str, object]:
        return {
            "batch": self.batch,
            "num_prompt": self.num_prompt,
            "num_output": self.num_output,
            "latency": self.whole.as_dict(),
            "time_to_first_token": self.first_token.as_dict(),
            "inter_token_latency": self.between_tokens.as_dict(),
        }


def measure_latency(
    engine: InferenceEngine, *, batch: int, num_prompt: int, num_output: int, repetitions: int
) -> LatencyReport:
    """Send `batch` requests and wait for all, `repetitions` times, after a warm-up: short on a CPU, full on a GPU."""
    on_gpu = engine.runner.kernels.launches_ahead
    first_sizes = (batch, num_prompt, num_output) if on_gpu else (1, WARM_UP_TOKENS, WARM_UP_TOKENS)
    run_until_done(engine, add_random(engine, *first_sizes))
    whole: list[float] = []
    first: list[float] = []
    between: list[float] = []
    for repetition in range(repetitions):
        recording = Recording(engine)
        requests = add_random(engine, batch, num_prompt, num_output, seed=repetition)
        while any(not request.is_finished for request in requests):
            recording.step()
        for times in recording.token_times.values():
            first.append(times[0])
            between.extend(b - a for a, b in pairwise(times))
        whole.append(max(times[-1] for times in recording.token_times.values()))
    return LatencyReport(
        batch,
        num_prompt,
        num_output,
        Distribution.of(whole),
        Distribution.of(first),
        Distribution.of(between),
        tuple(whole),
        tuple(first),
        tuple(between),
    )
