"""Columns are read from text, and rows have stable names."""

from __future__ import annotations

import pytest

from benchmarks.columns import Column, ColumnError, parse_columns
from benchmarks.engines import ENGINES
from benchmarks.models import FILES, file_name, split_name
from benchmarks.rows import SUITES, all_rows, select
from benchmarks.shapes import SHAPES
from benchmarks.workload_list import WORKLOADS
from bifolio.errors import ConfigError

# Rows that published tables name; a row may be added, none may be renamed.
STABLE = (
    "S-q8_0/prefill512", "S-q4_0/decode1", "S-q4_0/decode1@4096", "S-q4_0/decode16", "M-q4_0/decode1",
    "smollm2-q4_0/decode1", "smollm2-q4_k_m/decode16", "smollm2-q8_0/prefill128", "smollm2-q4_1/top_p16",
    "smollm2-q4_1/start", "smollm2-q4_1/n4", "smollm2-q4_1/beams4", "smollm2-q4_1/prefix16", "smollm2-q4_1/grammar16",
    "smollm2-q4_1/streams16", "hybrid-q4_0/turn", "experts-q4_k/decode16", "T4-q2_k/decode1", "T4-q3_k/prefill128",
    "T4-iq2_xxs/decode16", "qwen3-0.6b/greedy256", "llama-1b/top_p256", "qwen3-1.7b/mixed256", "llama-3b/n4x64",
    "llama-8b/single", "llama-8b/start", "qwen3-30b-a3b/greedy256", "qwen3.5-9b/single", "qwen3-1.7b/prompt8k",
    "qwen3-1.7b/prompt16k", "qwen3-1.7b/prompt32k", "qwen3-1.7b/continued",
)  # fmt: skip


def test_a_column_has_options_and_an_environment() -> None:
    column = Column.parse("bifolio[kv_cache_dtype=q8_0,block_size=32,deterministic=true,BIFOLIO_ISA=avx2]")
    assert column.engine == "bifolio"
    assert column.options == {"kv_cache_dtype": "q8_0", "block_size": 32, "deterministic": True}
    assert column.environment == {"BIFOLIO_ISA": "avx2"}
    names = [each.name for each in parse_columns("bifolio, llama.cpp[flash_attn=true,type_k=f16],vllm")]
    assert names == ["bifolio", "llama.cpp[flash_attn=true,type_k=f16]", "vllm"]


@pytest.mark.parametrize("text", ["", "bifolio[", "bifolio[x]", "a b", "bifolio[=1]"])
def test_other_text_is_no_column(text: str) -> None:
    with pytest.raises(ColumnError):
        Column.parse(text)


def test_every_row_names_a_model_a_workload_and_engines_that_exist() -> None:
    for row in all_rows().values():
        assert row.workload_name in WORKLOADS
        assert {column.engine for column in row.parsed_columns()} <= set(ENGINES)
        shape, _ = split_name(row.model)
        assert shape in SHAPES or row.model in FILES or shape in ("smollm2", "stories")


def test_names_are_stable() -> None:
    assert set(STABLE) - set(all_rows()) == set()


def test_rows_are_selected_by_suite_name_and_pattern() -> None:
    assert [row.name for row in select(["served"])] == [row.name for row in SUITES["served"]]
    assert {row.name for row in select(["S-q4_?/decode1*"])} == {
        "S-q4_0/decode1",
        "S-q4_0/decode1@4096",
        "S-q4_0/decode16",
    }
    assert select(["M-q6_k/decode1"])[0].columns == "bifolio"  # any model, any workload
    with pytest.raises(ConfigError, match="did you mean 'T4-q3_k/decode16'"):
        select(["T4-q3_k/decod16"])


def test_files_of_models() -> None:
    assert file_name("S-q4_0") == "S-q4_0.gguf"
    assert file_name("llama-1b") == "llama-1b"
    assert file_name("T-awq") == "T-awq"
    assert split_name("qwen3-30b-a3b") == ("qwen3-30b-a3b", "bf16")
