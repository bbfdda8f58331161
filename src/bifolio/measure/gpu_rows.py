"""The rows of the GPU benchmark: one function per row, on a given engine, each with its limit."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from bifolio.beam_params import BeamSearchParams
from bifolio.engine.engine import InferenceEngine
from bifolio.measure.gpu_limits import Limits
from bifolio.measure.gpu_models import cache_bytes, prefill_operations, state_bytes, weight_bytes
from bifolio.sampling_params import SamplingParams
from bifolio.sequence import Request


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured value and its upper limit (lower limit for times)."""

    row: str
    unit: str
    value: float
    limit: float | None
    smaller_is_better: bool
    note: str = ""

    @property
    def fraction(self) -> float | None:
        """Fraction of the limit reached; 1 is optimal."""
        if not self.limit or not self.value:
            return None
        return self.limit / self.value if self.smaller_is_better else self.value / self.limit

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "fraction": self.fraction}


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)


class Rows:
    """Measures on one engine. Prompts are random and never repeat, so that the prefix cache has no accidental hits."""

    def __init__(self, engine: InferenceEngine, limits: Limits, scale: float = 1.0) -> None:
        self.engine, self.limits = engine, limits
        self.config = engine.model.config
        self.scale = scale  # below 1: smaller loads, for a quick run
        self._random = np.random.default_rng(0)
        self._number = 0

    # -- running -----------------------------------------------------------------------------------------------------
    def prompt(self, length: int) -> list[int]:
        tokens: list[int] = self._random.integers(10, self.config.vocab_size - 10, length).tolist()
        return tokens

    def add(self, prompt: list[int], params: SamplingParams) -> Request:
        self._number += 1
        return self.engine.add_request(f"bench-{self._number}", prompt, params)

    def drain(self) -> float:
        """Run all requests to their end; return the seconds."""
        start = time.perf_counter()
        while self.engine.has_work:
            self.engine.step()
        return time.perf_counter() - start

    def warm_up(self) -> None:
        """Kernels compiled, libraries loaded, graphs captured."""
        if self.engine.slots.device is not None:
            self.engine.slots.device.warm_up()
        for lengths in ((128,), (300, 40, 700), (2048, 2048), (130,), (10,), (50,), (*range(40, 1000, 30),)):
            for length in lengths:
                self.add(self.prompt(length), greedy(4 + length % 5))
            self.drain()
        for own in (10, 200, 64):
            self._run_common_prefix(512, own, 4)
        self._run_beams(4)

    def _scaled(self, count: int, least: int = 1) -> int:
        return max(least, int(count * self.scale))

    # -- limits ------------------------------------------------------------------------------------------------------
    def _decode_seconds(self, sequences: int, context: float) -> float:
        """Lower limit of a decode step's seconds: weights read once, every context once."""
        read = weight_bytes(self.config, sequences) + sequences * context * cache_bytes(self.config)
        read += sequences * state_bytes(self.config)
        return read / self.limits.bytes_per_second

    # -- rows --------------------------------------------------------------------------------------------------------
    def single(self) -> Figure:
        new = self._scaled(256, 16)
        best = float("inf")
        for _ in range(2):
            request = self.add(self.prompt(128), greedy(new))
            self.drain()
            metrics = request.metrics
            best = min(best, (metrics.finished - metrics.first_token) / (new - 1))
        limit = self._decode_seconds(1, 128 + new / 2)
        return Figure("1 sequence, prompt 128, 256 new", "ms/token", best * 1e3, limit * 1e3, True)

    def crowd(self) -> Figure:
        random = np.random.default_rng(0)
        count = self._scaled(256, 8)
        lengths = random.integers(100, 1025, (count, 2))
        for num_in, num_out in lengths.tolist():
            self.add(self.prompt(num_in), greedy(num_out))
        steps = self.engine.stats().num_steps
        seconds = self.drain()
        steps = self.engine.stats().num_steps - steps
        outputs = int(lengths[:, 1].sum())
        contexts = sum(float(o) * (i + o / 2) for i, o in lengths.tolist())
        active = [int((lengths[:, 1] >= step).sum()) for step in range(1, int(lengths[:, 1].max()) + 1)]
        weights = sum(weight_bytes(self.config, sequences) for sequences in active)
        read = contexts * cache_bytes(self.config) + weights + sum(active) * state_bytes(self.config)
        least = read / self.limits.bytes_per_second
        least += prefill_operations(self.config, lengths[:, 0]) / self.limits.operations_per_second
        name = f"{count} requests, in and out uniform 100-1024"
        note = f"{steps} steps, {seconds / steps * 1e3:.2f} ms each"
        return Figure(name, "output tok/s", outputs / seconds, outputs / least, False, note)

    def first_token(self) -> Figure:
        length = self._scaled(8192, 256)
        best = float("inf")
        for _ in range(3):
            self.add(self.prompt(length), greedy(1))
            best = min(best, self.drain())
        limit = prefill_operations(self.config, np.array([length])) / self.limits.operations_per_second
        return Figure(f"one prompt of {length}", "ms to first token", best * 1e3, limit * 1e3, True)

    def prompts(self) -> Figure:
        length = self._scaled(2048, 128)
        best = float("inf")
        for _ in range(2):
            for _ in range(16):
                self.add(self.prompt(length), greedy(1))
            best = min(best, self.drain())
        limit = prefill_operations(self.config, np.full(16, length)) / self.limits.operations_per_second
        total = 16 * length
        return Figure(f"16 prompts of {length}", "input tok/s", total / best, total / limit, False)

    def decode(self) -> Figure:
        length, new = self._scaled(2048, 128), self._scaled(257, 17)
        requests = [self.add(self.prompt(length), greedy(new)) for _ in range(64)]
        while any(len(request.sequences[0].output_token_ids) < 3 for request in requests):
            self.engine.step()
        start, before = time.perf_counter(), self._num_outputs(requests)
        while not any(request.is_finished for request in requests):  # all 64 run to the end
            self.engine.step()
        seconds, count = time.perf_counter() - start, self._num_outputs(requests) - before
        self.drain()
        limit = self._decode_seconds(64, length + new / 2)
        return Figure(f"64 sequences at context {length}", "output tok/s", count / seconds, 64 / limit, False)

    def _num_outputs(self, requests: list[Request]) -> int:
        return sum(len(request.sequences[0].output_token_ids) for request in requests)

    def common_prefix(self) -> Figure:
        prefix, own, new = self._scaled(4096, 256), 64, self._scaled(128, 16)
        seconds = min(self._run_common_prefix(prefix, own, new) for _ in range(2))
        count = 64 * new
        read = weight_bytes(self.config, 64) + (prefix + 64 * (own + new / 2)) * cache_bytes(self.config)
        read += 64 * state_bytes(self.config)
        least = new * read / self.limits.bytes_per_second
        lengths = np.array([prefix, *[own] * 64])
        least += prefill_operations(self.config, lengths) / self.limits.operations_per_second
        name = f"64 requests, common prefix {prefix} + 64 own"
        return Figure(name, "output tok/s", count / seconds, count / least, False)

    def _run_common_prefix(self, prefix: int, own: int, new: int) -> float:
        """Seconds for 64 requests with a common prefix."""
        beginning = self.prompt(prefix)
        for _ in range(64):
            self.add(beginning + self.prompt(own), greedy(new))
        return self.drain()

    def beams(self) -> Figure:
        new = self._scaled(128, 8)
        best = min(self._run_beams(new) for _ in range(2))
        limit = new * self._decode_seconds(32, 128 + new / 2)
        return Figure("beams: width 4, 8 prompts of 128, 128 new", "seconds", best, limit, True)

    def _run_beams(self, new: int) -> float:
        """Seconds for eight prompts of 128 tokens, four beams each."""
        for _ in range(8):
            self._number += 1
            params = BeamSearchParams(beam_width=4, max_tokens=new, ignore_eos=True)
            self.engine.add_beam_search(f"bench-{self._number}", self.prompt(128), params)
        return self.drain()

    def all(self) -> dict[str, Callable[[], Figure]]:
        return {
            "single": self.single,
            "decode": self.decode,
            "crowd": self.crowd,
            "first_token": self.first_token,
            "prompts": self.prompts,
            "common_prefix": self.common_prefix,
            "beams": self.beams,
        }
