"""`--shard` of tests/gpu: every test runs in exactly one shard, and the large ones run one after the other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
pytestmark = pytest.mark.full


def collect(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-o", "addopts=", *options, str(HERE / "gpu")]
    return subprocess.run(command, capture_output=True, text=True, cwd=HERE.parent, check=False)


def names(*options: str) -> list[str]:
    done = collect(*options)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if "::" in line]


def test_shards_are_a_partition() -> None:
    whole = names()
    first, second, third = (names("--shard", f"{index}/3") for index in (1, 2, 3))
    assert sorted(first + second + third) == sorted(whole)
    assert abs(len(second) - len(third)) <= 1
    large = [name for name in whole if "deterministic.py" in name or "test_real_shapes" in name]
    assert first == large


@pytest.mark.parametrize("shard", ["0/2", "3/2", "x", "1"])
def test_a_shard_that_does_not_exist_is_an_error(shard: str) -> None:
    done = collect("--shard", shard)
    assert done.returncode == 4
    assert "pass a part and the number of parts, such as 1/4" in done.stdout + done.stderr
