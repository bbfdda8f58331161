"""The tiers of tests: `-m quick` has tests of every package and none of those that take long."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

HERE = Path(__file__).parent
PACKAGES = ("api", "cache", "cli", "engine", "kernels", "model", "quant", "sampling", "schedule", "serve", "text")
SLOW_TO_IMPORT = ("transformers", "anthropic", "scipy.stats", "schemathesis", "matplotlib.pyplot")
COLLECT = f"""
import json, sys, pytest

class Tiers:
    def pytest_collection_finish(self, session):
        imported = [name for name in {SLOW_TO_IMPORT} if name in sys.modules]
        names = {{item.nodeid: [mark.name for mark in item.iter_markers()] for item in session.items}}
        sys.stderr.write(json.dumps([names, imported]))

sys.exit(pytest.main(["--collect-only", "-q", "-m", "", sys.argv[1]], plugins=[Tiers()]))
"""


def collect_all() -> tuple[dict[str, list[str]], list[str]]:
    """All tests with their marks, and the slow modules that their collection loaded, from a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", COLLECT, str(HERE)], capture_output=True, text=True, cwd=HERE.parent, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("[{")]  # libraries may write others
    marks, imported = json.JSONDecoder().raw_decode(line)[0]
    return marks, imported


@pytest.mark.full
def test_tiers(collected: Any) -> None:
    """The tiers of all tests; their collection leaves out modules that take long to import."""
    every = {path for path in HERE.rglob("test_*.py") if path.parent.name != "interpreter"}
    if every <= collected.files:  # this run collected all tests itself
        marks, imported = collected.marks, [name for name in SLOW_TO_IMPORT if name in collected.modules]
    else:
        marks, imported = collect_all()
    marks = {name.removeprefix("tests/"): tiers for name, tiers in marks.items()}
    quick = [name for name, tiers in marks.items() if "quick" in tiers]
    whole = [name for name, tiers in marks.items() if "slow" not in tiers]
    assert set(quick) < set(whole)
    for package in PACKAGES:
        assert sum(name.startswith(package + "/") for name in quick) >= 10, package
    assert any("test_file_fuzz" in name for name in whole)
    assert not any("test_file_fuzz" in name for name in quick)
    assert not any("test_native_selftest" in name for name in whole)  # minutes of compilation
    assert not any("TestCacheMachine" in name for name in quick)
    assert imported == []
    cases: dict[str, list[bool]] = defaultdict(list)
    for name, tiers in marks.items():
        if "sampled" in tiers:
            cases[name.partition("[")[0]].append("slow" not in tiers)
    assert all(any(taken) for taken in cases.values()), "a sampled test without a case"


class StandInCase:
    """A case of a test with its marks."""

    def __init__(self, name: str, **marks: tuple[int, ...]) -> None:
        self.nodeid, self.marks = name, marks

    def get_closest_marker(self, name: str) -> Any:
        return SimpleNamespace(args=self.marks[name]) if name in self.marks else None

    def add_marker(self, name: str) -> None:
        self.marks[name] = ()


def test_a_run_takes_one_of_each_few_cases_by_its_seed(pytestconfig: pytest.Config) -> None:
    (plugin,) = (each for each in pytestconfig.pluginmanager.get_plugins() if hasattr(each, "leave_cases_out"))

    def taken(seed: str) -> list[str]:
        cases = [StandInCase(f"test_a[{number}]", sampled=(3,)) for number in range(8)]
        cases += [StandInCase("test_a[long]", sampled=(3,), slow=()), StandInCase("test_b[0]")]
        plugin.leave_cases_out(cases, seed)
        return [case.nodeid for case in cases if "slow" not in case.marks]

    assert taken("1") == taken("1")
    chosen = [taken(str(seed)) for seed in range(50)]
    assert {len(names) for names in chosen} == {3 + 1}
    assert {name for names in chosen for name in names} == {f"test_a[{number}]" for number in range(8)} | {"test_b[0]"}
    many = [StandInCase(f"test_c[{number}]") for number in range(12)] + [StandInCase(f"test_d[{n}]") for n in range(11)]
    every = [StandInCase(f"test_e[{number}]", sampled=(1,)) for number in range(12)]
    plugin.leave_cases_out([*many, *every], "1")
    left = [case.nodeid[:6] for case in [*many, *every] if "slow" not in case.marks]
    assert (left.count("test_c"), left.count("test_d"), left.count("test_e")) == (6, 11, 12)
    folders = {"tests/serve": 2, "tests/docs": 2, "tests/model": 3, "tests/kernels": 6}
    for folder, count in folders.items():  # neighbouring full tests of a file; quick ones all
        full = [StandInCase(f"{folder}/test_x.py::test_{number}", full=()) for number in range(6)]
        quick = [StandInCase(f"{folder}/test_x.py::test_quick_{number}") for number in range(3)]
        plugin.leave_cases_out([*full, *quick], "1")
        assert sum("slow" not in case.marks for case in full) == count
        assert not any("slow" in case.marks for case in quick)
