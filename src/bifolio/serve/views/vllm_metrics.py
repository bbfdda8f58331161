"""The metrics under vLLM's names, for gateways that know no others (`--metrics-compat vllm`).

llm-d, AIBrix, Dynamo and endpoint pickers of the Gateway API read `vllm:num_requests_waiting` and so on, with the
labels `model_name` and `engine`. The same numbers stay under their own names.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from bifolio.api.messages import Hello
from bifolio.serve.views.metrics import PREFIX

VLLM = "vllm:"
SHARED = frozenset((
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries", "prefix_cache_hits",
    "num_preemptions", "prompt_tokens", "generation_tokens", "request_success", "time_to_first_token_seconds",
    "external_prefix_cache_queries", "external_prefix_cache_hits",
    "inter_token_latency_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
    "request_prefill_time_seconds", "request_decode_time_seconds", "request_prompt_tokens",
    "request_generation_tokens", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens",
))  # fmt: skip


class _Renamed(Collector):
    """Metrics of a rendered page under vLLM's names, and the sizes of the cache."""

    def __init__(self, body: bytes, model_name: str, hello: Hello | None) -> None:
        self._body = body
        self._labels = {"model_name": model_name, "engine": "0"}
        self._hello = hello

    def collect(self) -> Iterator[Any]:
        for family in text_string_to_metric_families(self._body.decode()):
            name = family.name.removeprefix(PREFIX)
            if name in SHARED and name != family.name:
                renamed = Metric(VLLM + name, family.documentation, family.type)
                for sample in family.samples:
                    new_name = VLLM + sample.name.removeprefix(PREFIX)
                    renamed.add_sample(new_name, {**self._labels, **sample.labels}, sample.value)
                yield renamed
        yield from self._infos()

    def _infos(self) -> Iterator[Any]:
        hello = self._hello
        if hello is None:
            return
        sizes = {
            "block_size": str(hello.block_size),
            "num_gpu_blocks": str(hello.num_blocks - 1),  # block 0 is padding
            "cache_dtype": hello.kv_cache_dtype,
            "enable_prefix_caching": str(hello.enable_prefix_caching),
            "engine": "0",
        }
        config = GaugeMetricFamily(VLLM + "cache_config_info", "Sizes of the KV cache.", labels=list(sizes))
        config.add_metric(list(sizes.values()), 1.0)
        yield config
        adapters = {"max_lora": "0", "running_lora_adapters": "", "waiting_lora_adapters": ""}
        lora = GaugeMetricFamily(VLLM + "lora_requests_info", "Adapters of requests.", labels=list(adapters))
        lora.add_metric(list(adapters.values()), time.time())
        yield lora


def with_vllm_names(model_name: str, hello: Callable[[], Hello | None]) -> Callable[[bytes], bytes]:
    """A function that adds vLLM's names to a rendered page."""

    def extend(body: bytes) -> bytes:
        registry = CollectorRegistry()
        registry.register(_Renamed(body, model_name, hello()))
        added: bytes = generate_latest(registry)
        return body + added

    return extend
