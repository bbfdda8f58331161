"""Published figures: `docs/performance.md` and the figures of README.md are those of `benchmarks/results`."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.docs import committed, outdated, page, quoted, with_quotes
from benchmarks.plot import plot
from benchmarks.results import Cell, ResultRow, Results
from benchmarks.table import number, table
from bifolio.errors import ConfigError


def test_the_pages_are_generated_from_the_results() -> None:
    assert [path.name for path, _ in outdated()] == [], "run `python -m benchmarks docs`"


def test_every_published_run_names_its_machine_date_and_command() -> None:
    for name, results in committed():
        assert results.machine.get("gpu") or results.machine.get("cpu"), name
        assert len(results.date) == 10, name
        assert results.command, name
        assert results.versions.get("commit"), name
        assert not results.setting.get("tiny"), name
        for row in results.rows:
            assert any(cell.passes for cell in row.columns.values()), row.row


def test_a_fast_host_comes_before_a_slow_one() -> None:
    text = page(committed())
    assert text.index("fast host") < text.index("slow host")


def row(unit: str, limit: float | None = None, **columns: list[float]) -> ResultRow:
    cells = {name: Cell(values) for name, values in columns.items()}
    return ResultRow("S-q4_0/decode1", "decode", "S-q4_0", unit, cells, limit)


def test_ratios_say_how_many_times_as_fast_we_are() -> None:
    rate = row("tok/s", 400.0, bifolio=[100.0, 200.0, 300.0], other=[50.0])
    assert (rate.value("bifolio"), rate.of_limit("bifolio"), rate.advantage("other")) == (200.0, 0.5, 4.0)
    wait = row("ms", 10.0, bifolio=[20.0], other=[30.0])
    assert (wait.of_limit("bifolio"), wait.advantage("other")) == (0.5, 1.5)
    printed = table(Results("t", "2026-01-01", {}, [rate]))
    assert "| S-q4_0 | decode | tok/s | 200 (100; 200; 300) | 50 | 50% | 4.00 |" in printed


def test_numbers_have_three_or_four_digits() -> None:
    assert [number(value) for value in (0.5081, 20.83, 585.0, 123.45, 49655.2)] == [
        "0.508",
        "20.83",
        "585",
        "123.5",
        "49,655",
    ]


def test_the_readme_quotes_figures_of_the_results() -> None:
    lines = quoted(committed())
    assert lines["the same model, one sequence: ms a token ¹"].endswith("| 3.65 |  | 4.94 |")
    text = "# Title\n| a | 1 | 2 | 3 |\n| b | 1 | 2 | 3 |\n"
    assert with_quotes(text, {"b": "| b | 4 | 5 | 6 |"}) == "# Title\n| a | 1 | 2 | 3 |\n| b | 4 | 5 | 6 |\n"
    with pytest.raises(ConfigError, match=r"README\.md has no line 'c'"):
        with_quotes(text, {"c": "| c |"})


@pytest.mark.full
def test_results_are_drawn(tmp_path: Path) -> None:
    plot([results for _, results in committed()[:2]], tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="nothing to draw"):
        plot([Results("t", "2026-01-01", {}, [row("ms", bifolio=[1.0])])], tmp_path / "q.png")
