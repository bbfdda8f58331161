"""`scripts/lowest-constraints` pins every dependency that has a floor."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "scripts" / "lowest-constraints"


@pytest.fixture(scope="module")
def script() -> Any:
    loader = SourceFileLoader("lowest_constraints", str(SCRIPT))
    module = module_from_spec(spec_from_loader("lowest_constraints", loader))  # type: ignore[arg-type]
    loader.exec_module(module)
    return module


def test_every_dependency_but_torch_is_pinned_to_its_floor() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=True)
    pinned = {(Requirement(line).name, str(Requirement(line).specifier)) for line in done.stdout.splitlines()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].values()
    every = [Requirement(text) for text in [*project["dependencies"], *(entry for extra in extras for entry in extra)]]
    floors = {
        (canonicalize_name(each.name), f"=={bound.version}")
        for each in every
        for bound in each.specifier
        if bound.operator == ">=" and each.name != "torch"
    }
    assert pinned == floors
    assert len(floors) > 20


@pytest.mark.parametrize(
    ("requirement", "expected"),
    [
        ("numpy>=2.0", "numpy==2.0"),
        ("Array_API >= 1.2.3 , < 2", "array-api==1.2.3"),
        ("uvloop>=0.21; sys_platform != 'win32'", "uvloop==0.21; sys_platform != 'win32'"),
        ("uvicorn[standard]>=0.34", "uvicorn==0.34"),
    ],
)
def test_a_floor_becomes_a_pin(script: Any, requirement: str, expected: str) -> None:
    assert script.constraints([requirement]) == [expected]


@pytest.mark.parametrize("requirement", ["numpy", "numpy<3", "numpy>=1,>=2"])
def test_a_requirement_without_one_floor_is_refused(script: Any, requirement: str) -> None:
    with pytest.raises(SystemExit, match="exactly one lower bound"):
        script.constraints([requirement])


def test_two_floors_of_one_package_are_refused(script: Any) -> None:
    with pytest.raises(SystemExit, match="two floors"):
        script.constraints(["numpy>=2.0", "numpy>=2.1"])
