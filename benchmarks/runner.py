"""The runner: engines in turns on one model after the other, every pass kept.

CPU   all engines of a model are open; for each row A B, again A B: a slowdown of the machine meets all of them
GPU   one engine at a time has the device: A (all rows), B (all rows), again A, B, a new process for each turn
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.columns import Column
from benchmarks.limits import Limits, ModelFacts, limit_of
from benchmarks.models import ModelStore
from benchmarks.processes import Setting, Worker, cold_caches
from benchmarks.results import Cell, ResultRow, Results
from benchmarks.rows import Row
from bifolio.errors import BifolioError


@dataclass(frozen=True)
class Plan:
    """How often and in which order."""

    rounds: int = 2  # turns of each engine
    passes: int = 1  # of a row in each turn
    exclusive: bool = False  # one engine at a time is open
    columns: tuple[Column, ...] = ()  # of all rows; empty: those of each row

    def columns_of(self, row: Row) -> tuple[Column, ...]:
        return self.columns or row.parsed_columns()


class Runner:
    """Runs rows and fills the results; `note` is called after each group of rows and with every figure."""

    def __init__(
        self, results: Results, setting: Setting, plan: Plan, store: ModelStore, limits: Limits | None,
        note: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
    ) -> None:  # fmt: skip
        self.results, self._setting, self._plan, self._store, self._limits = results, setting, plan, store, limits
        self._note = note
        self.found: dict[str, ResultRow] = {}

    def run(self, rows: Sequence[Row], saved: Callable[[], None] = lambda: None) -> None:
        for model in dict.fromkeys(row.model for row in rows):
            own = [row for row in rows if row.model == model]
            try:
                path = self._store.path(model)
                self._add(own, path)
            except BifolioError as error:
                self._note(f"{model}: {error}")
                continue
            self._measure(path, own)
            saved()

    def _add(self, rows: Sequence[Row], path: Path | str) -> None:
        facts = ModelFacts.of(path) if self._limits is not None else None
        for row in rows:
            workload = row.workload.tiny() if self._setting.tiny else row.workload
            limit = None if facts is None or self._limits is None else limit_of(workload, facts, self._limits)
            entry = ResultRow(row.name, row.workload.title, row.model, row.workload.unit, limit=limit)
            self.found[row.name] = entry
            self.results.rows.append(entry)

    # -- turns -----------------------------------------------------------------------------------------------------
    def _measure(self, path: Path | str, rows: Sequence[Row]) -> None:
        lasting = [row for row in rows if not row.workload.fresh]
        columns = list(dict.fromkeys(column for row in lasting for column in self._plan.columns_of(row)))
        if self._plan.exclusive:
            for number in range(self._plan.rounds):
                for column in columns:
                    with self._open(column, path) as worker:
                        self._turn(worker, lasting, number)
        elif columns:
            workers = [self._open(column, path) for column in columns]
            try:
                for number in range(self._plan.rounds):
                    for row in lasting:
                        for worker in workers:
                            self._turn(worker, [row], number)
            finally:
                for worker in workers:
                    worker.close()
        for number in range(self._plan.rounds):
            for row in rows:
                if row.workload.fresh:
                    self._starts(row, path, number)

    def _turn(self, worker: Worker, rows: Sequence[Row], number: int) -> None:
        for row in rows:
            if worker.column not in self._plan.columns_of(row):
                continue
            for again in range(self._plan.passes):
                seed = 1 + number * self._plan.passes + again
                self._record(row, worker, worker.measure(row.workload_name, seed))

    def _starts(self, row: Row, path: Path | str, number: int) -> None:
        """A process of its own for each figure."""
        for column in self._plan.columns_of(row):
            with tempfile.TemporaryDirectory() as folder:
                is_cold = getattr(row.workload, "cold", False)
                setting = replace(self._setting, caches=cold_caches(Path(folder)) if is_cold else {})
                with self._open(column, path, setting) as worker:
                    key = "peak" if row.workload.unit == "MB" else "seconds"
                    found = worker.opened
                    answer = {"value": found[key]} if key in found else worker.measure(row.workload_name, number)
                    self._record(row, worker, answer)

    def _open(self, column: Column, path: Path | str, setting: Setting | None = None) -> Worker:
        worker = Worker(column, path, setting or self._setting)
        for name, value in worker.opened.get("about", {}).items():
            self.results.versions.setdefault(column.name, {})[name] = value
        if worker.failed:
            self._note(f"{column.name}: {worker.failed}")
        return worker

    def _record(self, row: Row, worker: Worker, answer: dict[str, Any]) -> None:
        cell = self.found[row.name].columns.setdefault(worker.column.name, Cell())
        if "value" in answer:
            cell.passes.append(answer["value"])
            cell.details |= answer.get("details", {})
            self._note(f"{row.name}  {worker.column.name}  {answer['value']:,.5g} {row.workload.unit}")
        else:
            cell.missing = answer.get("unsupported") or answer.get("error", "no answer")
            if "error" in answer:
                self._note(f"{row.name}  {worker.column.name}  FAILED {cell.missing}")


def new_results(title: str, machine: dict[str, Any], versions: dict[str, Any], command: str) -> Results:
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    return Results(title, date, machine, versions=versions, command=command)


def failures(results: Results) -> Iterator[str]:
    """Rows without a figure of bifolio."""
    for row in results.rows:
        for name, cell in row.columns.items():
            if name.startswith("bifolio") and not cell.passes:
                yield f"{row.row} {name}: {cell.missing}"
