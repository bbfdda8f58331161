"""The tiers of tests: `-m quick` has tests of every package and none of those that take long."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PACKAGES = ("api", "cache", "cli", "engine", "kernels", "model", "quant", "sampling", "schedule", "serve", "text")


def collected(*options: str) -> list[str]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *options, str(HERE)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE.parent, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line.removeprefix("tests/") for line in done.stdout.splitlines() if "::" in line]


@pytest.mark.full
def test_tiers() -> None:
    quick, whole = collected("-m", "quick", "-o", "addopts="), collected("-o", "addopts=", "-m", "not slow")
    assert set(quick) < set(whole)
    for package in PACKAGES:
        assert sum(name.startswith(package + "/") for name in quick) >= 10, package
    assert any("test_file_fuzz" in name for name in whole)
    assert not any("test_file_fuzz" in name for name in quick)
    assert not any("test_native_selftest" in name for name in whole)  # minutes of compilation
    assert not any("TestCacheMachine" in name for name in quick)
