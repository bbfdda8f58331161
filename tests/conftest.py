"""Shared fixtures: where real data and models lie, when they are there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


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
