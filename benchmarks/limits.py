"""The limit of a row: bytes divided by the bandwidth and operations divided by the peak rate, both measured.

Decode steps read weights, keys and values (in 16 bits) and recurrent states: bytes. Prompts multiply: operations. Of
experts a step reads those that its sequences choose, taken as random.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.workloads import Decodes, Need, Workload
from bifolio.cache.storage import CacheLayout
from bifolio.config import ModelConfig
from bifolio.model.loader import load_model
from bifolio.model.weights import ModelWeights
from bifolio.quant.tensor import QuantizedTensor

RUNS = 5  # the best counts: other programs can only make a run slower


@dataclass(frozen=True)
class Limits:
    """Measured peak rates of a machine."""

    bytes_per_second: float
    float_ops_per_second: float
    integer_ops_per_second: float  # of products with quantised weights

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


@dataclass(frozen=True)
class ModelFacts:
    """The sizes of a model that limits depend on."""

    config: ModelConfig
    weight_bytes: float  # that every step reads, experts not counted
    expert_bytes: float
    is_quantised: bool

    @classmethod
    def of(cls, path: Path | str) -> ModelFacts:
        model = load_model(path)
        weights, config = model.weights, model.config
        total = sum(_bytes(matrix) for matrix in weights.matrices())
        unread = 0 if config.tie_embeddings else _bytes(weights.embedding)
        experts = _expert_bytes(weights)
        return cls(config, total - unread - experts, experts, _is_quantised(weights))

    def step_bytes(self, step: Decodes) -> float:
        moe, config = self.config.moe, self.config
        share = 0.0 if moe is None else 1 - (1 - moe.top_k / moe.num_experts) ** step.sequences
        layout = CacheLayout.of_model(config, 1, 1, "f16")
        tokens = step.prefix + step.sequences * step.context
        cached = tokens * layout.bytes_per_token + 2 * step.sequences * layout.bytes_per_state
        return self.weight_bytes + share * self.expert_bytes + cached

    def prompt_operations(self, prompts: Sequence[tuple[int, int]]) -> float:
        """Multiplications and additions of prompts (cached, new), the logits of their last tokens included."""
        config = self.config
        head = config.vocab_size * config.hidden_size
        matrices = config.num_active_parameters - head * (1 if config.tie_embeddings else 2)
        pairs = sum(new * (cached + new / 2) for cached, new in prompts)
        attention = 4.0 * len(config.attention_layers) * config.query_size * pairs
        return 2.0 * matrices * sum(new for _, new in prompts) + attention + 2.0 * head * len(prompts)


def _bytes(matrix: Any) -> float:
    return float(getattr(matrix, "nbytes", 0))


def _expert_bytes(weights: ModelWeights) -> float:
    layers = [layer.moe for layer in weights.layers if layer.moe is not None]
    return sum(_bytes(matrix) for moe in layers for matrix in moe.experts.matrices())


def _is_quantised(weights: ModelWeights) -> bool:
    parts = [part for layer in weights.layers for part in layer.down.parts or layer.output.parts]
    return any(isinstance(part, QuantizedTensor) and part.format.is_quantized for part in parts)


def least_seconds(facts: ModelFacts, need: Need, limits: Limits) -> float:
    read = sum(step.steps * facts.step_bytes(step) for step in need.decodes)
    rate = limits.integer_ops_per_second if facts.is_quantised else limits.float_ops_per_second
    return read / limits.bytes_per_second + facts.prompt_operations(need.prompts) / rate


def limit_of(workload: Workload, facts: ModelFacts, limits: Limits) -> float | None:
    """The best possible figure of a workload, in its unit; None where none is defined."""
    need = workload.need()
    if not need.prompts and not need.decodes:
        return None
    seconds = least_seconds(facts, need, limits)
    if workload.unit == "s":
        return seconds
    if workload.unit == "ms":
        return 1e3 * seconds
    if workload.unit == "ms/token":
        return 1e3 * seconds / sum(step.steps for step in need.decodes)
    if workload.unit == "input tok/s":
        return sum(new for _, new in need.prompts) / seconds
    return sum(step.sequences * step.steps for step in need.decodes) / seconds


def measure_limits(device: str, threads: int | None) -> Limits | None:
    """Peak rates; None where the native kernels are not built."""
    if device.startswith("cuda"):
        from benchmarks.gpu_limits import measure_limits as measure

        found = measure(device)
        return Limits(found.bytes_per_second, found.operations_per_second, found.operations_per_second)
    from bifolio.errors import MissingDependencyError
    from bifolio.kernels import native

    def best(rate: Callable[[], float]) -> float:
        return max(rate() for _ in range(RUNS))

    try:
        native.set_num_threads(threads or 0)
        floats = best(lambda: native.product_rate(False))
        integers = best(lambda: native.product_rate(True))
        return Limits(best(native.read_bandwidth), floats, max(floats, integers))  # AMX multiplies bytes as bfloat16
    except MissingDependencyError:
        return None
