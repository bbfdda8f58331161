"""The rows: a workload on a model, `MODEL/WORKLOAD`. Names are stable; suites are lists of rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from benchmarks.columns import Column, parse_columns
from benchmarks.random_files import LOW_BITS
from benchmarks.workload_list import WORKLOADS
from benchmarks.workloads import Workload
from bifolio.errors import ConfigError, did_you_mean

BESIDE_LLAMA = "bifolio,llama.cpp"
BESIDE_VLLM = "bifolio,vllm"
BESIDE_ENCODERS = "bifolio-vectors,sentence-transformers,onnxruntime,llama.cpp-vectors"
TEXTS = tuple(f"{count}{length}" for count in ("text", "texts") for length in (16, 64, 256))
EXACT = "bifolio,bifolio[deterministic=true]"
SPEEDS = ("prefill512", "decode1", "decode1@4096", "decode16")
FILE_SPEEDS = ("prefill128", "decode1", "decode16", "start", "memory")
REQUESTS = ("greedy256", "top_p256", "mixed256", "scored256", "n4x64", "single", "start")
PROMPTS = ("prompt8k", "prompt16k", "prompt32k", "continued")
DENSE = ("qwen3-0.6b", "llama-1b", "qwen3-1.7b", "llama-3b", "llama-8b")


@dataclass(frozen=True)
class Row:
    """One row of a table."""

    model: str
    workload_name: str
    columns: str  # those that are run unless --engines names others

    @property
    def name(self) -> str:
        return f"{self.model}/{self.workload_name}"

    @property
    def workload(self) -> Workload:
        return WORKLOADS[self.workload_name]

    def parsed_columns(self) -> tuple[Column, ...]:
        return parse_columns(self.columns)


def rows_of(models: Iterable[str], workloads: Iterable[str], columns: str) -> list[Row]:
    workloads = tuple(workloads)
    return [Row(model, workload, columns) for model in models for workload in workloads]


SUITES: dict[str, list[Row]] = {
    "cpu": [
        *rows_of((f"S-{format}" for format in ("f16", "q8_0", "q4_0")), SPEEDS, BESIDE_LLAMA),
        *rows_of((f"M-{format}" for format in ("q8_0", "q4_0", "q4_k_m")), SPEEDS, BESIDE_LLAMA),
    ],
    "cpu-files": [
        *rows_of((f"smollm2-{format}" for format in ("q4_0", "q4_1", "q4_k_m", "q8_0")), FILE_SPEEDS, BESIDE_LLAMA),
        *rows_of(("gemma-270m", "qwen2.5-coder-1.5b", "tinyllama-iq2_xxs"), FILE_SPEEDS, BESIDE_LLAMA),
    ],
    "cpu-requests": [
        *rows_of(("smollm2-q4_1",), ("top_p16", "crowd16"), BESIDE_LLAMA),
        *rows_of(("smollm2-q4_1",), ("n4", "beams4", "prefix16", "grammar16"), "bifolio"),
    ],
    "served": rows_of(("smollm2-q4_1", "stories"), ("streams16",), "bifolio,bifolio-async,bifolio-http"),
    "low-bits": rows_of((f"T4-{format}" for format in LOW_BITS), ("prefill128", "decode1", "decode16"), BESIDE_LLAMA),
    "experts": rows_of(("experts-q4_0", "experts-q4_k"), ("prefill128", "decode1", "decode16"), BESIDE_LLAMA),
    "hybrid": rows_of(
        ("hybrid-q4_0", "hybrid-q8_0"), ("prefill512", "decode1", "decode8", "turn", "edited_turn"), BESIDE_LLAMA
    ),
    "instruction-sets": rows_of(
        ("S-q8_0", "S-q4_0", "T-q4_k_m", "T-q6_k", "T-q4_0"), ("prefill512", "decode1", "decode16"), BESIDE_LLAMA
    ),
    "caches": rows_of(("S-q8_0",), SPEEDS, ",".join(
        ["bifolio", *(f"bifolio[kv_cache_dtype={name}]" for name in ("f16", "bf16", "q8_0"))])),
    "block-sizes": rows_of(("S-q4_0",), SPEEDS, ",".join(
        ["bifolio", *(f"bifolio[block_size={size}]" for size in (8, 32, 64, 128))])),
    "vectors": rows_of(("minilm",), TEXTS, BESIDE_ENCODERS),
    "folders": rows_of(("T-fp8", "T-awq", "T-gptq"), ("start", "memory"), "bifolio"),
    "dense": rows_of(("S",), SPEEDS, "bifolio,transformers"),
    "gpu": rows_of(DENSE, REQUESTS, BESIDE_VLLM),
    "gpu-long": [
        *rows_of(("qwen3-1.7b", "llama-3b", "llama-8b"), PROMPTS, BESIDE_VLLM),
        *rows_of(DENSE, ("single@16k",), BESIDE_VLLM),
    ],
    "gpu-exact": [
        *rows_of(DENSE, ("greedy256", "top_p256", "single"), EXACT),
        *rows_of(("qwen3-1.7b",), PROMPTS, EXACT),
    ],
    "gpu-experts": rows_of(("qwen3-30b-a3b",), ("greedy256", "top_p256", "single", "prompt8k", "start"), BESIDE_VLLM),
    "gpu-hybrid": rows_of(
        ("qwen3.5-9b", "qwen3-next-half"), ("greedy256", "top_p256", "single", "prompt8k", "turn", "start"), "bifolio"
    ),
    "gpu-shared": rows_of(
        ("llama-1b", "llama-8b"), ("decode64", "prefix64", "prompts16", "n8x16", "grammar256", "beams8"), BESIDE_VLLM
    ),
    "gpu-adapters": rows_of(
        ("qwen3-1.7b-lora", "llama-8b-lora"),
        ("step1", "step1_a1", "step64", "step64_a1", "step64_a8", "step64_a64", "greedy256", "adapters256"),
        BESIDE_VLLM,
    ),
    "gpu-served": rows_of(("llama-1b",), ("streams256",), "bifolio,bifolio-http[front_ends=2,clients=4]"),
    "gpu-start": rows_of(DENSE, ("start_cold", "start"), BESIDE_VLLM),
}  # fmt: skip


def all_rows() -> dict[str, Row]:
    """Every row by name; a row of several suites has the columns of the first."""
    found: dict[str, Row] = {}
    for rows in SUITES.values():
        for row in rows:
            found.setdefault(row.name, row)
    return found


def select(names: Sequence[str]) -> list[Row]:
    """Rows of suites, by name, or by a pattern such as `S-*/decode1`; any model may be joined with any workload."""
    known, chosen = all_rows(), dict[str, Row]()
    for name in names:
        if name in SUITES:
            found = SUITES[name]
        elif name in known:
            found = [known[name]]
        else:
            found = [row for row in known.values() if fnmatchcase(row.name, name)] or [_joined(name, known)]
        for row in found:
            chosen.setdefault(row.name, row)
    return list(chosen.values())


def _joined(name: str, known: dict[str, Row]) -> Row:
    model, _, workload = name.partition("/")
    if workload not in WORKLOADS:
        hint = did_you_mean(name, [*SUITES, *known]) or ": `python -m benchmarks list` names suites and rows"
        raise ConfigError(f"there is no row {name!r}{hint}")
    return Row(model, workload, "bifolio")
