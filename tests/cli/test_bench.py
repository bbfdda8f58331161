"""`bifolio bench`: tables, JSON and pictures of every kind of benchmark."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bifolio.cli import moved
from bifolio.cli.bench import numbers
from bifolio.cli.bench_output import title
from bifolio.cli.main import build_app
from bifolio.errors import ConfigError
from cli_runner import CliRunner

TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:15:{46 + number}.6805900,{10 + 7 * number},{2 + 5 * (number % 3)}\n" for number in range(6)
)
SMALL = ("--shape", "tiny", "--kernels", "reference")


def run(*arguments: str) -> str:
    result = CliRunner().invoke(build_app(), ["bench", *arguments, *SMALL], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def run_json(*arguments: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(run(*arguments, "--json"))
    return record


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return path


def test_throughput_prints_a_row_for_every_test() -> None:
    printed = run("throughput", "-p", "8", "-n", "3", "-d", "0,5", "-b", "1,2", "-r", "1")
    for name in ("pp8", "pp8 x2", "tg3", "tg3@d5", "tg3 x2", "tg3@d5 x2"):
        assert name in printed


@pytest.mark.parametrize(("device", "place"), [("cpu", "2 threads"), ("cuda:1", "cuda:1")])
def test_a_title_says_where_it_ran(device: str, place: str) -> None:
    setting = {"model": "m", "format": "f32", "num_parameters": 1, "weight_bytes": 4, "kernels": "k", "threads": 2}
    assert title({**setting, "device": device}).endswith(f", k, {place}")


def test_throughput_as_json() -> None:
    record = run_json("throughput", "-p", "8", "-n", "0", "-r", "2", "--format", "q8_0")
    assert (record["model"], record["format"], record["kernels"]) == ("random-tiny-q8_0", "q8_0", "reference")
    (row,) = record["rows"]
    assert (row["test"], len(row["samples"])) == ("pp8", 2)
    assert row["tokens_per_second"] > 0


def test_latency_as_table_and_json() -> None:
    arguments = ("latency", "-p", "8", "-n", "3", "-b", "2", "-r", "2")
    assert "between tokens" in run(*arguments)
    record = run_json(*arguments)
    assert record["inter_token_latency"]["count"] == 2 * 2 * 2
    assert record["time_to_first_token"]["p50"] > 0


@pytest.mark.full
def test_trace_compared_with_static_batching(trace_file: Path, tmp_path: Path) -> None:
    picture = tmp_path / "trace.png"
    record = run_json("trace", str(trace_file), "--scale", "1", "--speed", "0", "--max-num-seqs", "3",
                      "--block-size", "4", "--compare", "static", "--plot", str(picture))  # fmt: skip
    runs = {entry["name"]: entry for entry in record["runs"]}
    assert set(runs) == {"continuous", "static, padded", "static, packed"}
    assert {entry["num_output_tokens"] for entry in runs.values()} == {2 * (2 + 7 + 12)}
    assert record["throughput_of_continuous_over_static_padded"] == pytest.approx(
        runs["continuous"]["output_tokens_per_second"] / runs["static, padded"]["output_tokens_per_second"]
    )
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.full
def test_a_comparison_sends_all_requests_at_once_unless_told(trace_file: Path) -> None:
    assert run_json("trace", str(trace_file), "--compare", "static")["speed"] == 0.0
    assert run_json("trace", str(trace_file), "--compare", "static", "--speed", "100")["speed"] == 100.0


def test_trace_prints_the_ratio(trace_file: Path) -> None:
    printed = run("trace", str(trace_file), "--scale", "0.5", "--speed", "0", "--limit", "3", "--compare", "static")
    assert "KV slots filled" in printed
    assert "throughput of continuous over static padded:" in printed


@pytest.mark.full
def test_wrong_settings_are_refused_before_anything_runs(trace_file: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a folder"):
        run("trace", str(trace_file), "--plot", str(tmp_path / "absent" / "out.png"))
    with pytest.raises(ConfigError, match=r"\.png"):
        run("trace", str(trace_file), "--plot", str(tmp_path / "out.exe"))
    for arguments in (["trace", str(trace_file), "--compare", "magic"], ["throughput", "-p", "0", "-n", "0"]):
        assert CliRunner().invoke(build_app(), ["bench", *arguments]).exit_code == 2
    for text in ("", "a", "1,-2"):
        with pytest.raises(Exception, match="number"):
            numbers(text)
    assert numbers("1, 8,16") == [1, 8, 16]


@pytest.mark.full
@pytest.mark.parametrize(
    "arguments",
    [
        ("throughput", "-p", "8", "-n", "3", "-b", "1,2", "-r", "2"),
        ("latency", "-p", "8", "-n", "3", "-b", "2", "-r", "2"),
    ],
)
def test_throughput_and_latency_draw_pictures(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    picture = tmp_path / "picture.png"
    assert f"picture: {picture}" in run(*arguments, "--plot", str(picture)).replace("\n", "")
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.full
def test_the_trace_of_the_readme_shows_the_difference_between_kinds_of_batching(data_dir: Path) -> None:
    """Steps and computed tokens follow from the trace; times do not."""
    trace = data_dir / "traces" / "azure_conv.csv"
    command = ["bench", "trace", str(trace), "--limit", "100", "--scale", "0.1", "--speed", "0", "--max-num-seqs", "8",
               "--compare", "static", "--shape", "tiny", "--json"]  # fmt: skip
    result = CliRunner().invoke(build_app(), command, catch_exceptions=False)
    continuous, padded, packed = json.loads(result.stdout)["runs"]
    assert padded["num_steps"] > 1.5 * continuous["num_steps"]
    assert packed["num_steps"] > 1.5 * continuous["num_steps"]


def test_verbs_that_have_moved_say_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moved, "source_tree", lambda: None)
    for old, new in {"gpu": "gpu", "cluster": "fleet", "targets": "targets", "formats": "formats"}.items():
        with pytest.raises(ConfigError, match=f"`bifolio bench {old}` is now `python -m benchmarks {new}`"):
            CliRunner().invoke(build_app(["bench"]), ["bench", old, "--json"], catch_exceptions=False)
    help_text = CliRunner().invoke(build_app(["bench"]), ["bench", "--help"]).stdout
    assert "cluster" not in help_text


@pytest.mark.full
def test_a_verb_that_has_moved_still_runs(capfd: pytest.CaptureFixture[str]) -> None:
    done = CliRunner().invoke(build_app(["bench"]), ["bench", "targets", "--help"])
    assert done.exit_code == 0
    printed = capfd.readouterr()
    assert "usage: python -m benchmarks targets" in printed.out


def test_a_foreign_package_of_that_name_is_not_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "benchmarks", raising=False)
    monkeypatch.setattr(moved, "__file__", str(tmp_path / "a" / "b" / "c" / "moved.py"))
    assert moved.source_tree() is None
