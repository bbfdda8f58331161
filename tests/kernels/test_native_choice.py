"""Which kernels run: the best instruction set, the next where it is missing, the reference ones without a library."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from bifolio.kernels import native

pytest.importorskip("bifolio.kernels._native")

STORY = """
import sys
from bifolio.cli.main import main
sys.argv = ["bifolio", "generate", "Once", "-n", "6", "-t", "0", "--device", "cpu", "--echo"]
main()
"""
WITHOUT = """
import sys
missing = {}

class Guard:
    def find_spec(self, name, path=None, target=None):
        if name in missing:
            raise ModuleNotFoundError("No module named " + repr(name), name=name)

sys.meta_path.insert(0, Guard())
"""


def run(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {
        k: v for k, v in os.environ.items() if k not in ("BIFOLIO_ISA", "BIFOLIO_MASK_ISA", "BIFOLIO_KERNELS")
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=environment | variables,
    )
    assert done.returncode == 0, done.stderr
    return done


def chosen(**variables: str) -> list[str]:
    """The instruction set in use, then all that can be used."""
    code = "from bifolio.kernels import native; print(native.isa(), *native.available_isas())"
    return run(code, **variables).stdout.split()


@pytest.mark.full
def test_the_best_instruction_set_is_used() -> None:
    assert chosen() == [native.available_isas()[0], *native.available_isas()]


@pytest.mark.full
def test_a_machine_without_the_best_takes_the_next() -> None:
    sets = native.available_isas()
    for missing in range(1, len(sets)):  # all but the generic one
        assert chosen(BIFOLIO_MASK_ISA=",".join(sets[:missing])) == [sets[missing], *sets[missing:]]
    assert chosen(BIFOLIO_MASK_ISA=",".join([*sets, "mmx"])) == ["generic", "generic"]


@pytest.mark.full
def test_one_can_be_asked_for() -> None:
    assert chosen(BIFOLIO_ISA="generic")[0] == "generic"


@pytest.mark.full
def test_the_text_is_the_same_on_a_lesser_machine() -> None:
    masked = ",".join(name for name in native.available_isas() if name != "generic")
    if not masked:
        pytest.skip("this machine has the generic instruction set alone")
    assert run(STORY, BIFOLIO_MASK_ISA=masked).stdout == run(STORY).stdout


@pytest.mark.full
@pytest.mark.parametrize(("missing", "left"), [(["torch"], "reference"), ([], "torch")])
def test_without_the_library_it_runs_and_says_once_why_it_is_slow(missing: list[str], left: str) -> None:
    if left == "torch":
        pytest.importorskip("torch")
    done = run(WITHOUT.format(["bifolio.kernels._native", *missing]) + STORY + "main()")
    assert done.stdout.count("Once") == 2
    assert done.stderr.count(f"{left} kernels, which are slow") == 1
    assert "install a C++20 compiler" in done.stderr
