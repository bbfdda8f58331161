"""The kernels' own test, without Python: every instruction set of this machine, and the tiles of AMX in plain C++."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "sizes", [pytest.param(["--few"], marks=pytest.mark.slow), pytest.param([], marks=pytest.mark.slow)]
)
def test_every_instruction_set_equals_plain_cpp(sizes: list[str], tmp_path: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("there is no C++ compiler")
    done = subprocess.run(
        ["sh", str(ROOT / "scripts" / "native-selftest"), *sizes],
        env={**os.environ, "BUILD_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tiles" in done.stdout.splitlines()[0]
    assert "all comparisons passed" in done.stdout
