"""Engines behind one small interface: each opens a model file or folder by its own public interface.

This package is imported in the processes of other engines: its modules import their libraries inside functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

ADAPTERS = "adapters"  # in the folder of a model


class Unsupported(Exception):  # noqa: N818  # an answer, not a failure: the table has an empty cell
    """The engine cannot run this workload."""


@dataclass(frozen=True)
class Ask:
    """One request: greedy and of exactly `max_tokens` tokens unless the options say otherwise.

    Options are those of `SamplingParams` (temperature, top_p, n, logprobs, ...), and `schema` (JSON that follows it),
    `beams` (a beam search of this width) or `adapter` (the number of one of the folder's low-rank adapters).
    """

    prompt: list[int]
    max_tokens: int
    options: dict[str, Any] = field(default_factory=dict)


Outputs = list[list[int]]  # the tokens of every completion


@dataclass(frozen=True)
class Done:
    """The answers of one call."""

    outputs: Outputs
    seconds: float | None = None  # where the engine has a clock of its own
    details: dict[str, float] = field(default_factory=dict)  # figures beside the time, for the record

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.outputs))


Call = Callable[[], Done]


def adapters_of(model: Path) -> list[Path]:
    """The low-rank adapters beside the weights of a folder, by number."""
    return sorted((model / ADAPTERS).glob("a*"), key=lambda path: int(path.name[1:]))


@dataclass(frozen=True)
class Opening:
    """How an engine is opened."""

    model: Path
    options: dict[str, Any]
    device: str = "cpu"
    threads: int | None = None


class Engine(Protocol):
    """An open engine."""

    vocab_size: int

    def prepare(self, asks: Sequence[Ask]) -> Call:
        """A call that answers all requests together; parameters are made before it is timed."""
        ...

    def reserve(self, sequences: int, length: int) -> None:
        """The largest call that follows: sequences at a time, tokens of the longest one."""
        ...

    def about(self) -> dict[str, str]:
        """Versions and kernels, for the record."""
        ...

    def close(self) -> None: ...


ENGINES = {
    "bifolio": ("benchmarks.engines.bifolio", "Offline"),
    "bifolio-async": ("benchmarks.engines.bifolio", "Async"),
    "bifolio-http": ("benchmarks.engines.bifolio_http", "Served"),
    "llama.cpp": ("benchmarks.engines.llama_cpp", "LlamaCpp"),
    "vllm": ("benchmarks.engines.vllm", "Vllm"),
    "transformers": ("benchmarks.engines.transformers", "Transformers"),
    "openvino": ("benchmarks.engines.openvino", "OpenVINO"),
    "bifolio-vectors": ("benchmarks.engines.vectors", "Bifolio"),
    "sentence-transformers": ("benchmarks.engines.vectors", "SentenceTransformers"),
    "onnxruntime": ("benchmarks.engines.vectors", "OnnxRuntime"),
    "llama.cpp-vectors": ("benchmarks.engines.vectors", "LlamaCpp"),
}
PACKAGES = {
    "llama.cpp": "llama_cpp", "vllm": "vllm", "transformers": "transformers", "openvino": "openvino",
    "sentence-transformers": "sentence_transformers", "onnxruntime": "onnxruntime", "llama.cpp-vectors": "llama_cpp",
}  # fmt: skip


def open_engine(name: str, opening: Opening) -> Engine:
    if name not in ENGINES:
        raise Unsupported(f"there is no engine {name!r}: use one of {', '.join(ENGINES)}")
    if name in PACKAGES and find_spec(PACKAGES[name]) is None:
        raise Unsupported(f"{name} is not installed: its package {PACKAGES[name]} is missing")
    module, class_name = ENGINES[name]
    engine: Engine = getattr(import_module(module), class_name)(opening)
    return engine


def greedy_only(asks: Sequence[Ask], engine: str) -> None:
    """Refuse requests with options, for engines whose sampling is not driven here."""
    for ask in asks:
        if ask.options:
            raise Unsupported(f"{engine} is measured with greedy requests alone")
