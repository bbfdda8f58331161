"""Prometheus metrics, with the names that dashboards for other engines read after their prefix."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from bifolio.api.client import EngineClient
from bifolio.api.messages import Ended

PREFIX = "bifolio:"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LATENCY = (0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 30, 60, 120, 300, 600)
_BETWEEN_TOKENS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)
_COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)

# name -> (of the engine's counters, help)
_ENGINE_COUNTERS = {
    "num_preemptions": ("num_preemptions", "Sequences that lost their blocks and are recomputed."),
    "prefix_cache_queries": ("num_prompt_tokens", "Prompt tokens looked up in the prefix cache."),
    "prefix_cache_hits": ("num_cached_tokens", "Prompt tokens found in the prefix cache."),
    "prefill_tokens": ("num_prefill_tokens", "Tokens computed in the prefill phase."),
    "decode_tokens": ("num_decode_tokens", "Tokens computed in the decode phase."),
    "forced_tokens": ("num_forced_tokens", "Output tokens without a step: their grammar left no choice."),
    "recurrent_checkpoint_hits": ("num_checkpoint_hits", "Requests that began at a checkpoint."),
    "external_prefix_cache_queries": (
        "num_tier_queries",
        "Prompt tokens looked up in the tiers below the cache.",
    ),
    "external_prefix_cache_hits": ("num_tier_hits", "Of those, tokens that came from a tier."),
    "tier_stored": ("num_tier_stored", "Blocks and states that the tiers were given."),
    "tier_dropped": ("num_tier_dropped", "Blocks that left the cache while the tiers were busy."),
    "recurrent_checkpoint_evictions": ("num_evicted_states", "States that were evicted."),
    "engine_steps": ("num_steps", "Steps of the engine."),
    "spec_decode_num_draft_tokens": ("num_draft_tokens", "Tokens guessed by speculation."),
    "spec_decode_num_accepted_tokens": ("num_accepted_tokens", "Guessed tokens that were right."),
    "engine_cpu_seconds": ("cpu_seconds", "CPU time of the engine process."),
}


class _EngineCollector(Collector):
    """Reads the last report of the engine process; nothing is stored twice."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Any]:
        engine, stats = self._engine, self._engine.stats
        used, total = stats.get("num_used_blocks", 0.0), stats.get("num_blocks", 0.0)
        for name, text, value in (
            ("num_requests_running", "Sequences that hold a slot.", stats.get("num_running", 0.0)),
            ("num_requests_waiting", "Requests that wait for a slot.", stats.get("num_waiting", 0.0)),
            ("kv_cache_usage_perc", "Share of the KV cache's blocks in use; 1 is all.", used / total if total else 0.0),
            (
                "kv_cache_block_utilisation",
                "Reserved tokens over the capacity of the blocks in use.",
                stats.get("utilisation", 1.0),
            ),
            ("kv_cache_num_blocks", "Blocks of the KV cache.", total),
            ("kv_cache_shared_blocks", "Blocks that several sequences hold.", stats.get("total_shared_blocks", 0.0)),
            ("kv_cache_block_references", "Blocks without sharing.", stats.get("total_references", 0.0)),
            ("kv_cache_average_references", "Sequences per block.", stats.get("average_reference_count", 0.0)),
            ("tier_bytes", "Bytes of blocks in the tiers below the cache.", stats.get("num_tier_bytes", 0.0)),
            ("recurrent_states", "Recurrent states of a hybrid model.", stats.get("num_states", 0.0)),
            ("recurrent_states_held", "States of running sequences.", stats.get("num_held_states", 0.0)),
            ("recurrent_checkpoints", "States that prefixes can begin at.", stats.get("num_checkpoints", 0.0)),
            ("engine_up", "Whether the engine process is ready.", float(engine.health().is_ready)),
        ):
            yield GaugeMetricFamily(PREFIX + name, text, value)
        for name, (source, text) in _ENGINE_COUNTERS.items():
            yield CounterMetricFamily(PREFIX + name, text, engine.counter(source))
        yield CounterMetricFamily(PREFIX + "engine_restarts", "Restarts of the engine process.", engine.num_restarts)


class _CpuCollector(Collector):
    """CPU time of this process."""

    def collect(self) -> Iterator[Any]:
        yield CounterMetricFamily(PREFIX + "front_end_cpu_seconds", "CPU time of the front ends.", time.process_time())


class _Sums(Collector):
    """The samples of several front ends, added up."""

    def __init__(self, texts: list[bytes]) -> None:
        self._texts = texts

    def collect(self) -> Iterator[Any]:
        families: dict[str, Metric] = {}
        values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
        for text in self._texts:
            for family in text_string_to_metric_families(text.decode()):
                families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                sums = values.setdefault(family.name, {})
                for sample in family.samples:
                    key = sample.name, tuple(sample.labels.items())
                    sums[key] = sums.get(key, 0.0) + sample.value
        for name, merged in families.items():
            for (sample_name, labels), value in values[name].items():
                merged.add_sample(sample_name, dict(labels), value)
            yield merged


class CountedHistogram(Collector):
    """A histogram that takes many equal values at once: a stream's update has many tokens."""

    def __init__(self, name: str, text: str, bounds: tuple[float, ...], registry: CollectorRegistry) -> None:
        self._name, self._text, self._bounds = name, text, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float, count: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def collect(self) -> Iterator[Any]:
        names = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        buckets = list(zip(names, accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)


class Metrics:
    """Counters and histograms of one server."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        registry.register(_CpuCollector())

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(PREFIX + name, text, buckets=buckets, registry=registry)

        self.time_to_first_token = histogram(
            "time_to_first_token_seconds", "From the arrival to the first token.", _LATENCY
        )
        self.inter_token = CountedHistogram(
            PREFIX + "inter_token_latency_seconds", "Between two tokens of a completion.", _BETWEEN_TOKENS, registry
        )
        self.end_to_end = histogram("e2e_request_latency_seconds", "From the arrival to the last token.", _LATENCY)
        self.queue = histogram("request_queue_time_seconds", "From the arrival to the first scheduling.", _LATENCY)
        self.prefill = histogram("request_prefill_time_seconds", "From there to the first token.", _LATENCY)
        self.decode = histogram("request_decode_time_seconds", "From there to the last token.", _LATENCY)
        self.prompt_length = histogram("request_prompt_tokens", "Tokens of a prompt.", _COUNTS)
        self.output_length = histogram("request_generation_tokens", "Tokens of a completion.", _COUNTS)
        self.prompt_tokens = Counter(PREFIX + "prompt_tokens", "Prompt tokens of all requests.", registry=registry)
        self.generation_tokens = Counter(PREFIX + "generation_tokens", "Generated tokens.", registry=registry)
        self.successes = Counter(
            PREFIX + "request_success", "Finished completions by reason.", ["finished_reason"], registry=registry
        )
        self.responses = Counter(
            PREFIX + "http_responses", "HTTP responses by path and status.", ["path", "status"], registry=registry
        )
        self.open_responses = Gauge(PREFIX + "http_open_requests", "HTTP requests in flight.", registry=registry)
        self.recent_latency = 1.0  # seconds; an average that forgets
        self.extend: Callable[[bytes], bytes] | None = None  # adds names that other programs read

    def watch(self, engine: EngineClient) -> None:
        self.registry.register(_EngineCollector(engine))

    def request_ended(self, ended: Ended, seconds: float) -> None:
        """`seconds` since the arrival at the front end."""
        self.end_to_end.observe(seconds)
        self.queue.observe(ended.queue_time)
        self.prefill.observe(ended.prefill_time)
        self.decode.observe(ended.decode_time)
        self.recent_latency += 0.1 * (seconds - self.recent_latency)

    def first_tokens_ended(self, ended: Ended, num_tokens: int) -> None:
        """Latencies of a request whose tokens were not streamed, from the engine's own clock."""
        self.time_to_first_token.observe(ended.queue_time + ended.prefill_time)
        if num_tokens > 1:
            self.inter_token.observe(ended.decode_time / (num_tokens - 1), num_tokens - 1)

    def render(self, others: Sequence[bytes] = ()) -> bytes:
        """As Prometheus reads them; the metrics of `others`, rendered by other front ends, are added."""
        body: bytes = generate_latest(self.registry)
        if others:
            registry = CollectorRegistry()
            registry.register(_Sums([body, *others]))
            body = generate_latest(registry)
        return body if self.extend is None else self.extend(body)
