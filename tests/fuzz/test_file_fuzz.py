"""Some damaged files of every kind and some hostile templates; `pytest -m slow` runs 20,000 and 1,000."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def fuzz(files: int, templates: int, seed: int) -> dict[str, Any]:
    """Run the fuzzer in a process of its own: it forks, and threads of a test process do not survive that."""
    command = [sys.executable, str(HERE / "file_fuzzer.py"), "--files", str(files), "--templates", str(templates)]
    paths = [str(ROOT / "src"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run([*command, "--seed", str(seed)], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{\n") :])
    return found


@pytest.mark.full
def test_damaged_files_and_hostile_templates_are_refused_by_name() -> None:
    found = fuzz(1000, 60, seed=1)
    outcomes = found["files"]["outcomes"]
    assert found["files"]["cases"] == 1000
    assert found["templates"]["cases"] == 60
    assert outcomes["used"] < 600, outcomes  # the mutations do damage
    assert outcomes["ModelFileError"] > 300, outcomes


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_twenty_thousand_files_and_a_thousand_templates() -> None:
    found = fuzz(25_000, 1000, seed=2)  # a fifth of them are llama2.c files
    assert (found["files"]["cases"], found["templates"]["cases"]) == (25_000, 1000)
