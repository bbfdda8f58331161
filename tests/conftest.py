"""Tiers of tests, and shared fixtures: where real data and models lie, when they are there.

    pytest -m quick    before a commit: every package, under a minute on two cores
    pytest             quick and full tests: everything that a change must pass
    pytest -m slow     long checks that are run by hand, in one process

A test is quick by itself. One that takes half a second or more, starts processes or servers of its own, compares with
transformers (seconds to import) or searches at random is marked `@pytest.mark.full`.

Of each `k` neighbouring cases of a test marked `@pytest.mark.sampled(k)` a run takes one, by a seed that it prints; the
others are slow. Without a mark it takes one of two cases of a test with many, and one of each few neighbouring full
tests of the folders that take longest (`SHARES`). `BIFOLIO_TEST_SEED` repeats a choice; `--every-case`, the name of a
file or a test, or `-k` leave nothing out.
"""

from __future__ import annotations

import gc
import os
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from bifolio.kernels.interface import KernelSet


@dataclass
class Collected:
    """Tests before any is deselected."""

    files: set[Path] = field(default_factory=set)
    marks: dict[str, list[str]] = field(default_factory=dict)  # names, of each test
    modules: frozenset[str] = frozenset()  # loaded when all tests were collected


COLLECTED = pytest.StashKey[Collected]()
MOST_WORKERS = 8  # each of them collects all tests
MANY_CASES = 12
SHARES = {  # a run takes one of so many full tests
    "serve": 3, "engine": 3, "model": 2, "train": 2, "cli": 2, "docs": 4, "interpreter": 2,
}  # fmt: skip
EXPENSIVE_FIXTURES = {"models_dir", "device"}  # real models, a GPU
sys.path.append(str(Path(__file__).resolve().parents[1]))  # the package `benchmarks`, which is not installed
os.environ.setdefault("BIFOLIO_CONFIG", os.devnull)  # options of the user's own configuration do not count here
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # workers and programs of tests import the same modules many times
SEED = os.environ.setdefault("BIFOLIO_TEST_SEED", str(random.randrange(10_000)))  # workers inherit it
if "PYTEST_XDIST_WORKER" in os.environ:  # workers share the cores: torch and numpy must not start a thread on each
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        default="cpu",
        help="where tests/gpu run: cuda (or cuda:1); see tests/gpu/conftest.py for ways to try them without a GPU",
    )
    parser.addoption("--every-case", action="store_true", help="run all cases of tests marked `sampled`")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads its options
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Run all tests on every core unless -n says otherwise; a worker without tests takes some of another one's.

    Slow tests measure times: they run in one process.
    """
    if not config.pluginmanager.hasplugin("xdist") or "PYTEST_XDIST_WORKER" in os.environ:
        return
    option = config.option
    has_slow = not option.markexpr or "slow" in option.markexpr.replace("not slow", "")
    is_whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    if is_whole and not has_slow and option.numprocesses is None and not (option.usepdb or option.capture == "no"):
        option.numprocesses, option.maxprocesses = "auto", option.maxprocesses or MOST_WORKERS
    if option.numprocesses and option.dist == "no":
        option.dist = "worksteal"


@pytest.fixture(scope="session", autouse=True)
def short_ngrams() -> None:
    """Draft after single tokens too: tiny models repeat those, and seldom two in a row."""
    from bifolio.engine.speculative import ngram

    ngram.SIZES = (4, 3, 2, 1)


def pytest_configure(config: pytest.Config) -> None:
    config.stash[COLLECTED] = Collected()


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> None:
    parent.config.stash[COLLECTED].files.add(file_path)


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give every test its tier: quick unless it is marked full or slow, or needs a fixture that takes long."""
    if samples_cases(config):
        leave_cases_out(items, SEED)
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        is_long = fixtures & EXPENSIVE_FIXTURES or any(item.iter_markers("full")) or any(item.iter_markers("slow"))
        if not is_long:
            item.add_marker("quick")
    found = config.stash[COLLECTED]
    found.marks = {item.nodeid: [mark.name for mark in item.iter_markers()] for item in items}
    found.modules = frozenset(sys.modules)


def samples_cases(config: pytest.Config) -> bool:
    option = config.option
    return not (option.every_case or option.keyword or any(".py" in argument for argument in config.args))


def leave_cases_out(items: list[pytest.Item], seed: str) -> None:
    """Mark as slow all but one of each few neighbouring cases of a test, or full tests of a file."""
    groups: dict[tuple[str, int], list[pytest.Item]] = defaultdict(list)
    counts: Counter[str] = Counter()
    own = [item for item in items if item.get_closest_marker("slow") is None]
    totals = Counter(item.nodeid.partition("[")[0] for item in own)
    for item in own:
        mark, test = item.get_closest_marker("sampled"), item.nodeid.partition("[")[0]
        folder = test.removeprefix("tests/").partition("/")[0]
        name, share = test, 1
        if mark is not None:
            share = mark.args[0]
        elif totals[test] >= MANY_CASES:
            share = 2
        elif folder == "interpreter" or item.get_closest_marker("full") is not None:
            name, share = test.partition("::")[0], SHARES.get(folder, 1)
        if share > 1:
            groups[name, counts[name] // share].append(item)
            counts[name] += 1
    for (name, group), cases in groups.items():
        chosen = random.Random(f"{seed}/{name}/{group}").choice(cases)
        for item in cases:
            if item is not chosen:
                item.add_marker("slow")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if samples_cases(config):
        terminalreporter.write_line(f"sampled cases: BIFOLIO_TEST_SEED={SEED} repeats them, --every-case runs all")


def pytest_collection_finish() -> None:
    """Keep the modules of all tests out of garbage collections: they live as long as the process."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def new_kernels() -> Callable[[], KernelSet]:
    """Makes the kernels that a test of the network or the engine runs on; in tests/gpu those of a GPU."""
    from bifolio.kernels.reference import ReferenceKernels

    return ReferenceKernels


@pytest.fixture(scope="session")
def collected(pytestconfig: pytest.Config) -> Collected:
    """The tests of this run before any was deselected."""
    return pytestconfig.stash[COLLECTED]


def _folder(variable: str) -> Path:
    value = os.environ.get(variable)
    if not value:
        pytest.skip(f"set {variable} to the folder that holds the files of this test")
    path = Path(value)
    if not path.is_dir():
        pytest.skip(f"{variable} names {path}, which is not a folder")
    return path


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Corpora, traces, prompts and vocabulary files (BIFOLIO_TEST_DATA)."""
    return _folder("BIFOLIO_TEST_DATA")


@pytest.fixture(scope="session")
def models_dir() -> Path:
    """Real model files (BIFOLIO_TEST_MODELS)."""
    return _folder("BIFOLIO_TEST_MODELS")
