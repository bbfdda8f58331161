"""The first minute: a wheel is built and installed, and the installed program tells a story."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from bifolio import __version__

pytestmark = pytest.mark.full
SOURCE = Path(__file__).resolve().parents[2]


def run(*command: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=600, check=False, env=environment,
        **options,  # type: ignore[call-overload]
    )  # fmt: skip


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel; the packages that bifolio needs are those of this one.

    The wheel is that of a machine without a C++ compiler: it is built in seconds.
    """
    folder = tmp_path_factory.mktemp("installed")
    built = run(sys.executable, "-m", "pip", "wheel", SOURCE, "--no-deps", "-C", "wheel.cmake=false", "-w", folder)
    if "No matching distribution found for scikit-build-core" in built.stderr or "No module named pip" in built.stderr:
        pytest.skip("the build needs pip and scikit-build-core from a package index")
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("bifolio-*.whl")
    venv.create(folder / "venv", with_pip=False)
    python = folder / "venv" / "bin" / "python"
    installed = run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel)
    assert installed.returncode == 0, installed.stderr
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    (site / "packages.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return folder / "venv"


def test_the_installed_program_tells_a_story(environment: Path, tmp_path: Path) -> None:
    program = environment / "bin" / "bifolio"
    assert run(program, "--version").stdout == f"bifolio {__version__}\n"
    where = run(environment / "bin" / "python", "-c", "import bifolio; print(bifolio.__file__)", cwd=tmp_path).stdout
    assert Path(where.strip()).is_relative_to(environment)
    told = run(program, "generate", "Once upon a time", "-n", "3", "-t", "0", "--echo", cwd=tmp_path)
    assert told.returncode == 0, told.stderr
    assert told.stdout.startswith("Once upon a time")
    assert len(told.stdout) > len("Once upon a time") + 2
    assert "which are slow" in told.stderr  # no compiler, no native kernels: said once


def test_the_installed_program_says_why_it_is_slow(environment: Path, tmp_path: Path) -> None:
    report = run(environment / "bin" / "bifolio", "doctor", "--json", cwd=tmp_path)
    assert report.returncode == 1
    problems = [problem["text"] for problem in json.loads(report.stdout)["problems"] if problem["slow"]]
    assert any("install a C++20 compiler" in text for text in problems)
