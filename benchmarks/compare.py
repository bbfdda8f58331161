"""Two checkouts of bifolio on one machine, in turns: the guard of a change that must not cost speed.

    python -m benchmarks compare S-q4_0/decode1 S-q4_0/decode16 --builds ../before ../after --threads 2
    python -m benchmarks compare gpu gpu-long --builds ../before . --device cuda --models /dev/shm/models

A round is A B B A, a new process for each, so that a machine that becomes slower meets both alike. Every process opens
the model, runs each row `--passes` times with the same requests, and the first pass warms up. The ratio of a row is the
speed of B divided by that of A, round by round; its interval has 95 % confidence (Student's t over the logarithms). A
row is `same` when the interval lies within `--limit` per cent, `slower` or `faster` when it lies outside; otherwise
rounds are added, up to `--most`. The exit code is 1 if a row is slower, 3 if one is unsure, 4 if one has no figure.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.columns import Column
from benchmarks.machine import describe, versions
from benchmarks.models import ModelStore
from benchmarks.processes import Setting, Worker
from benchmarks.results import Cell, ResultRow, Results
from benchmarks.rows import Row, select
from benchmarks.runner import new_results
from benchmarks.table import line, number
from benchmarks.workloads import CLOCKS
from bifolio.errors import ConfigError

ORDER = (0, 1, 1, 0)
# Student's t, 97.5 %, by degrees of freedom; 2 beyond.
STUDENT = (math.inf, 12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)


@dataclass
class Compared:
    """The figures of one row: of A and of B, two in each round."""

    row: Row
    figures: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    missing: str = ""

    def ratios(self) -> list[float]:
        """The speed of B over that of A, for each round."""
        first, second = ([_mean(pair) for pair in _pairs(side)] for side in self.figures)
        ratios = [b / a for a, b in zip(first, second, strict=True)]
        return ratios if self.row.workload.higher_is_better else [1 / ratio for ratio in ratios]

    def interval(self) -> tuple[float, float, float]:
        """(low, ratio, high) with 95 % confidence."""
        logs = [math.log(ratio) for ratio in self.ratios()]
        if not logs:
            return 0.0, math.nan, math.inf
        centre = statistics.fmean(logs)
        if len(logs) == 1:
            return 0.0, math.exp(centre), math.inf
        student = STUDENT[len(logs) - 1] if len(logs) <= len(STUDENT) else 2.0
        half = student * statistics.stdev(logs) / math.sqrt(len(logs))
        return math.exp(centre - half), math.exp(centre), math.exp(centre + half)

    def verdict(self, limit: float) -> str:
        if self.missing:
            return "missing"
        low, _, high = self.interval()
        if high < 1 - limit:
            return "slower"
        if low > 1 + limit:
            return "faster"
        return "same" if low >= 1 - limit and high <= 1 + limit else "unsure"

    def spread(self, side: int) -> float:
        """The range of all figures of a build, relative to their median."""
        figures = self.figures[side]
        return (max(figures) - min(figures)) / statistics.median(figures) if figures else 0.0


def _pairs(figures: Sequence[float]) -> list[tuple[float, float]]:
    return list(zip(figures[::2], figures[1::2], strict=False))


def _mean(pair: tuple[float, float]) -> float:
    return math.sqrt(pair[0] * pair[1])


class Comparison:
    """Runs rounds on the rows that are not decided."""

    def __init__(
        self, builds: Sequence[Path], setting: Setting, store: ModelStore, column: Column, passes: int,
        note: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
    ) -> None:  # fmt: skip
        self._settings = [_for_build(setting, build) for build in builds]
        self._builds, self._store, self._column, self._passes, self._note = builds, store, column, passes, note
        self._kernels: dict[int, str] = {}

    def round(self, compared: Sequence[Compared]) -> None:
        """A B B A on every model."""
        for model in dict.fromkeys(each.row.model for each in compared):
            path = self._store.path(model)
            own = [each for each in compared if each.row.model == model and not each.missing]
            for side in ORDER:
                self._turn(own, path, side)

    def _turn(self, compared: Sequence[Compared], path: Path | str, side: int) -> None:
        with Worker(self._column, path, self._settings[side]) as worker:
            self._check(worker, side)
            for each in compared:
                workload = each.row.workload
                opened = worker.opened["peak" if workload.unit == "MB" else "seconds"]
                figure = opened if workload.fresh else self._figure(worker, each)
                if figure is not None:
                    each.figures[side].append(figure)
                    self._note(f"{each.row.name}  {'AB'[side]}  {figure:,.5g} {workload.unit}")

    def _figure(self, worker: Worker, each: Compared) -> float | None:
        """The median of all passes but the first, which warms up."""
        found = []
        for seed in range(1, self._passes + 1):
            answer = worker.measure(each.row.workload_name, seed)
            if "value" not in answer:
                each.missing = answer.get("unsupported") or answer.get("error", "no answer")
                self._note(f"{each.row.name}: {each.missing}")
                return None
            found.append(float(answer["value"]))
        return statistics.median(found[1:] or found)

    def _check(self, worker: Worker, side: int) -> None:
        """The process measures the build that it was started for, and both builds have the same kernels."""
        if worker.failed:
            raise ConfigError(f"{self._builds[side]} does not run: {worker.failed}")
        about = worker.opened["about"]
        source = (self._builds[side] / "src").resolve()
        if not Path(about["path"]).resolve().is_relative_to(source):
            raise ConfigError(f"the process of {self._builds[side]} imported {about['path']}: uninstall that package")
        self._kernels[side] = about.get("kernels", "")
        if len(set(self._kernels.values())) > 1:
            raise ConfigError(
                f"the builds run different kernels ({self._kernels[0]} and {self._kernels[1]}): "
                "compile the native ones in both checkouts with scripts/build-native"
            )


def _for_build(setting: Setting, build: Path) -> Setting:
    if not (build / "src" / "bifolio" / "__init__.py").is_file():
        raise ConfigError(f"{build} is no checkout of bifolio: it has no src/bifolio")
    return replace(setting, source=build.resolve())


def table(compared: Sequence[Compared], limit: float) -> str:
    heads = ["row", "unit", "A", "B", "spread of A", "spread of B", "B / A", "95 % interval", "rounds", "verdict"]
    lines = [line(heads), line(["---"] * 2 + ["---:"] * 7 + ["---"])]
    for each in compared:
        low, ratio, high = each.interval()
        medians = [number(statistics.median(side)) if side else "" for side in each.figures]
        spreads = [f"{each.spread(side):.1%}" for side in (0, 1)]
        rounds = len(each.ratios())
        shown = f"{low:.3f} to {high:.3f}" if rounds > 1 else ""
        verdict = each.missing or each.verdict(limit)
        unit = each.row.workload.unit
        lines.append(line([each.row.name, unit, *medians, *spreads, f"{ratio:.3f}", shown, str(rounds), verdict]))
    return "\n".join(lines)


def as_results(compared: Sequence[Compared], results: Results) -> Results:
    for each in compared:
        workload = each.row.workload
        cells = {name: Cell(side, missing=each.missing) for name, side in zip("AB", each.figures, strict=True)}
        results.rows.append(ResultRow(each.row.name, workload.title, each.row.model, workload.unit, cells))
    return results


def exit_code(verdicts: Sequence[str]) -> int:
    return next((code for name, code in (("slower", 1), ("missing", 4), ("unsure", 3)) if name in verdicts), 0)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        "python -m benchmarks compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("rows", nargs="+", help="suites, rows or patterns, as of `run`")
    made.add_argument("--builds", nargs=2, type=Path, required=True, metavar=("A", "B"), help="two checkouts")
    made.add_argument("--engine", default="bifolio", help="the column, such as bifolio[deterministic=true]")
    made.add_argument("--rounds", type=int, default=3, help="rounds of every row")
    made.add_argument("--most", type=int, default=9, help="rounds of rows that are unsure")
    made.add_argument("--passes", type=int, default=2, help="of a row in a process; the first warms up")
    made.add_argument("--limit", type=float, default=1.0, help="per cent that count as the same")
    made.add_argument("--device", default="cpu", help="cpu or cuda")
    made.add_argument("--threads", type=int, default=None, help="of engines on a CPU")
    made.add_argument("--clock", default="wall", choices=tuple(CLOCKS), help="cpu: processor time, on a busy machine")
    made.add_argument("--models", type=Path, default=Path("out/models"), help="folder for model files")
    made.add_argument("--timeout", type=float, default=1800.0, help="seconds that one figure may take")
    made.add_argument("--tiny", action="store_true", help="tiny models and loads: runs the code, measures nothing")
    made.add_argument("--json", type=Path, default=None, help="file for all figures")
    return made


def main(arguments: Sequence[str]) -> int:
    options = parser().parse_args(arguments)
    setting = Setting(options.device, options.threads, options.clock, options.tiny, timeout=options.timeout)
    compared = [Compared(row) for row in select(options.rows)]
    store = ModelStore(options.models, options.tiny)
    comparison = Comparison(options.builds, setting, store, Column.parse(options.engine), options.passes)
    about: dict[str, Any] = {name: versions(build) for name, build in zip("AB", options.builds, strict=True)}
    command = "python -m benchmarks compare " + " ".join(arguments)
    machine = describe(options.device, options.threads)
    limit = options.limit / 100
    for count in range(max(options.rounds, options.most)):
        is_sure = [each.missing or each.verdict(limit) != "unsure" for each in compared]
        open_rows = [each for each, sure in zip(compared, is_sure, strict=True) if count < options.rounds or not sure]
        if not open_rows:
            break
        comparison.round(open_rows)
        if options.json is not None:
            as_results(compared, new_results("two builds", machine, about, command)).write(options.json)
    print(table(compared, limit))
    for name, build in zip("AB", options.builds, strict=True):
        found = about[name]
        print(f"{name}: {build} {found['commit']}{' with changes' if found['changed'] else ''}")
    return exit_code([each.verdict(limit) for each in compared])
