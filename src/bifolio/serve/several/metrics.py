"""The metrics of several models on one page: each sample has the name of its model."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from bifolio.serve.several.pool import ModelPool
from bifolio.serve.views.metrics import PREFIX


class _Rendered:
    """A collector of metrics that are known already."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> list[Metric]:
        return self._metrics


async def render(pool: ModelPool) -> bytes:
    """The page of all models that are loaded, and of the pool."""
    families: dict[str, Metric] = {}
    for name, entry in pool.entries.items():
        if entry.context is None:
            continue
        for family in text_string_to_metric_families((await entry.context.render_metrics()).decode()):
            known = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                known.add_sample(sample.name, {"model": name, **sample.labels}, sample.value)
    loaded = GaugeMetricFamily(PREFIX + "model_loaded", "1 for a model that takes memory.", labels=["model"])
    for name, entry in pool.entries.items():
        loaded.add_metric([name], float(entry.is_counted))
    numbers = {
        "models_bytes": ("Bytes of the loaded models.", pool.num_bytes),
        "models_budget_bytes": ("The most bytes of loaded models.", pool.settings.max_bytes),
        "models_evictions": ("Models that were evicted for others.", pool.num_evictions),
    }
    own = [GaugeMetricFamily(PREFIX + name, text, float(value)) for name, (text, value) in numbers.items()]
    registry = CollectorRegistry()
    registry.register(_Rendered([*families.values(), loaded, *own]))
    return generate_latest(registry)
