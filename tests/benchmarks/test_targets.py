"""The planned figures: what they are made of, and when one counts as met."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import build_app
from benchmarks.targets import (
    INTERPRETER_BYTES,
    TargetRow,
    crowd,
    measure_targets,
    peak_memory,
    required_memory,
    target_rows,
    targets_llm,
)
from bifolio.measure.random_models import random_model
from bifolio.measure.trace import Moment, TraceReport
from cli_runner import CliRunner


def test_a_target_is_met_on_its_own_side() -> None:
    assert TargetRow("speed", 71.0, "", 70.0).met is True
    assert TargetRow("speed", 70.0, "", 70.0).met is False
    assert TargetRow("memory", 1.1, "", 1.15, lower_is_better=True).met is True
    assert TargetRow("memory", 1.2, "", 1.15, lower_is_better=True).met is False
    assert TargetRow("sequences", 16, "", 16, reaching_is_enough=True).met is True
    assert TargetRow("sequences", 15, "", 16, reaching_is_enough=True).met is False
    assert TargetRow("for information", 1.0, "").met is None


def test_rows_come_from_what_was_measured() -> None:
    moments = [Moment(1.0, 1.0, 16, 0, 10, 0.95, 5), Moment(2.0, 1.0, 12, 0, 10, 0.75, 9)]
    report = TraceReport("crowd", 2, 8, 9, 2.0, 2.0, 100, 16, moments=moments)
    rows = {row.name: row for row in target_rows(80.0, report, peak=120, required=100)}
    assert rows["generation, tokens/s"].met
    assert rows["resident memory over need"].value == pytest.approx(1.2)
    assert rows["resident memory over need"].met is False
    assert rows["sequences at once"].value == 16
    assert rows["KV slots filled"].value == pytest.approx(0.85)
    assert rows["KV slots filled"].met is False
    assert rows["all sequences together, tokens/s"].value == pytest.approx(4.5)


@pytest.mark.full
def test_the_crowd_fills_every_row_of_the_engine() -> None:
    llm = targets_llm(random_model("tiny"), kernels="reference")
    rows = {row.name: row for row in measure_targets(llm, num_generated=4, repetitions=1, num_requests=17)}
    assert rows["sequences at once"].met
    assert rows["KV slots filled"].met
    assert rows["generation, tokens/s"].value > 0


def test_required_memory_counts_each_weight_once() -> None:
    llm = targets_llm(random_model("tiny", "q8_0"), kernels="reference")
    per_layer = (64 + 2 * 32) * 64 + 64 * 64 + 3 * 192 * 64
    weights = (512 * 64 + 2 * per_layer) * 34 // 32  # the embedding is the head
    assert required_memory(llm) == weights + llm.plan.cache_bytes + INTERPRETER_BYTES


def test_lengths_of_the_crowd_fit() -> None:
    requests = crowd(200, 448)
    assert max(request.num_prompt + request.num_output for request in requests) <= 448
    assert len({(request.num_prompt, request.num_output) for request in requests}) > 150


@pytest.mark.full
def test_the_peak_does_not_fall() -> None:
    before = peak_memory()
    held = bytearray(b"x" * (before // 2 + (64 << 20)))
    high = peak_memory()
    assert high >= len(held)
    del held
    assert peak_memory() >= high >= before


@pytest.mark.full
def test_targets_of_a_file_with_random_weights() -> None:
    arguments = ["targets", "-n", "2", "-r", "1", "--requests", "16", "--shape", "tiny", "--kernels", "reference"]
    record = json.loads(CliRunner().invoke(build_app(), [*arguments, "--json"], catch_exceptions=False).stdout)
    assert (record["model"], record["format"], record["kv_dtype"]) == ("random-tiny-q4_0.gguf", "q4_0", "f16")
    rows = {row["name"]: row for row in record["rows"]}
    assert rows["sequences at once"] == {"name": "sequences at once", "value": 16, "target": 16, "met": True}
    assert rows["KV slots filled"]["met"]
    printed = CliRunner().invoke(build_app(), arguments, catch_exceptions=False).stdout
    assert "< 1.15" in printed
    assert "> 90%" in printed


@pytest.mark.full
def test_formats_are_measured_one_by_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "t.txt"
    text.write_text("Tom had a red ball. He threw it to Lily and she laughed. " * 20)
    picture = tmp_path / "p.png"
    build_app()([
        "formats", "-m", "stories", "--formats", "q4_k_m,q8_0", "--text", str(text), "-p", "16", "-n", "4",
        "-r", "1", "--tokens", "128", "--threads", "1", "--plot", str(picture), "--json",
    ])  # fmt: skip
    rows = json.loads(capsys.readouterr().out)["formats"]
    assert [row["format"] for row in rows] == ["q4_k_m", "q8_0"]
    assert rows[0]["file_bytes"] < rows[1]["file_bytes"]
    assert all(row["prefill"] > 0 and row["decode"] > 0 for row in rows)
    assert 0.8 < rows[0]["perplexity"] / rows[1]["perplexity"] < 1.25
    assert picture.stat().st_size > 1000
