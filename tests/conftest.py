"""Tiers of tests, and shared fixtures: where real data and models lie, when they are there.

    pytest -m quick    before a commit: every package, under a minute on two cores
    pytest             quick and full tests: everything that a change must pass
    pytest -m slow     long checks that are run by hand

A test is quick by itself. One that takes half a second or more, starts processes or servers of its own, compares with
transformers (seconds to import) or searches at random is marked `@pytest.mark.full`.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from bifolio.kernels.interface import KernelSet


EXPENSIVE_FIXTURES = {"models_dir", "device"}  # real models, a GPU
os.environ.setdefault("BIFOLIO_CONFIG", os.devnull)  # options of the user's own configuration do not count here
if "PYTEST_XDIST_WORKER" in os.environ:  # workers share the cores: torch and numpy must not start a thread on each
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        default="cpu",
        help="where tests/gpu run: cuda (or cuda:1); see tests/gpu/conftest.py for ways to try them without a GPU",
    )


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by -m
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give every test its tier: quick unless it is marked full or slow, or needs a fixture that takes long."""
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        is_long = fixtures & EXPENSIVE_FIXTURES or any(item.iter_markers("full")) or any(item.iter_markers("slow"))
        if not is_long:
            item.add_marker("quick")


def pytest_collection_finish() -> None:
    """Keep the modules of all tests out of garbage collections: they live as long as the process."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def new_kernels() -> Callable[[], KernelSet]:
    """Makes the kernels that a test of the network or the engine runs on; in tests/gpu those of a GPU."""
    from bifolio.kernels.reference import ReferenceKernels

    return ReferenceKernels


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
