"""`bifolio inspect` before anything is allocated: the architecture and the memory plan of a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from bifolio import LLM
from bifolio.cli.inspect import RECURRENT_KINDS
from bifolio.cli.main import build_app
from bifolio.config import RecurrentConfig
from cli_runner import CliRunner
from helpers import TINY, tiny_folder


@pytest.fixture(scope="module")
def folder() -> Path:
    return tiny_folder(tokenizer=True)


def inspect(folder: Path, *options: str) -> str:
    result = CliRunner().invoke(build_app(), ["inspect", str(folder), *options], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def plan(folder: Path, *options: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(inspect(folder, "--json", *options))["memory_plan"]
    return found


def test_the_plan_is_the_one_that_would_run(folder: Path) -> None:
    options = ("--memory", "2MB", "--max-model-len", "128", "--block-size", "8", "--kv-dtype", "f16")
    shown = plan(folder, *options)
    actual = LLM(folder, memory="2MB", max_model_len=128, block_size=8, dtype="f16").plan
    assert shown["num_blocks"] == actual.num_blocks
    assert shown["cache_bytes"] == actual.cache_bytes <= 2_000_000
    assert shown["weight_bytes"] == actual.weight_bytes
    assert shown["num_full_sequences"] == actual.max_cached_tokens // 128


def test_parameters_are_counted(folder: Path) -> None:
    values = json.loads((folder / "config.json").read_text())
    d, ffn, kv = values["hidden_size"], values["intermediate_size"], values["hidden_size"] // 2
    per_layer = 2 * d * d + 2 * kv * d + 3 * d * ffn + 2 * d
    expected = 2 * values["vocab_size"] * d + values["num_hidden_layers"] * per_layer + d
    assert plan(folder)["num_parameters"] == expected
    assert f"{expected:,} parameters" in inspect(folder)


def test_memory_that_is_too_small_says_what_would_work(folder: Path) -> None:
    printed = inspect(folder, "--memory", "10kB")
    assert "cannot run" in printed
    assert "max_model_len" in printed
    assert "error" in plan(folder, "--memory", "a lot")
    assert "error" in plan(folder, "--kv-dtype", "f8")


def test_architecture_in_words(folder: Path) -> None:
    printed = inspect(folder, "--no-tensors")
    assert f"{TINY['num_hidden_layers']} layers of {TINY['hidden_size']}" in printed
    assert "2 for keys and values" in printed
    assert "q_proj" not in printed


def test_every_kind_of_recurrence_has_a_name() -> None:
    kinds = get_args(get_type_hints(RecurrentConfig)["kind"])
    assert RECURRENT_KINDS.keys() == set(kinds)
