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
SCORES = """
from bifolio import LLM, SamplingParams
from bifolio.kernels import native
print(native.isa())
params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)
output = LLM("stories", threads=1).generate(["Once upon a time"], params, use_tqdm=False)[0].outputs[0]
for token, entry in zip(output.token_ids, output.logprobs):
    print(token, entry[token].logprob.hex())
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


def run(code: str, *arguments: str, status: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {
        k: v for k, v in os.environ.items() if k not in ("BIFOLIO_ISA", "BIFOLIO_MASK_ISA", "BIFOLIO_KERNELS")
    }
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=environment | variables,
    )
    assert done.returncode == status, done.stderr
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
    """Every table that the CPU allows runs a small model: the same tokens, and without tiles the same bits."""
    found = {name: run(SCORES, BIFOLIO_ISA=name).stdout.split() for name in native.available_isas()}
    assert [isa for isa, *_ in found.values()] == list(found)
    tokens = {name: scores[::2] for name, (_, *scores) in found.items()}
    logprobs = {name: [float.fromhex(one) for one in scores[1::2]] for name, (_, *scores) in found.items()}
    exact = {name: values for name, values in logprobs.items() if name != "amx"}
    assert len(set(map(tuple, tokens.values()))) == 1
    assert len(set(map(tuple, exact.values()))) <= 1
    for values in logprobs.values():
        assert len(values) == 12
        assert values == pytest.approx(logprobs["generic"], abs=0.05)


@pytest.mark.full
@pytest.mark.parametrize("name", ["sse9", "neon" if os.uname().machine == "x86_64" else "avx2", "AVX2"])
def test_an_instruction_set_that_the_machine_lacks_is_refused_by_name(name: str) -> None:
    done = run("from bifolio.cli.main import main; main()", "generate", "Once", status=2, BIFOLIO_ISA=name)
    known = ", ".join(native.available_isas())
    assert f"this machine has no instruction set {name}: choose one of {known}" in done.stderr
    assert "Traceback" not in done.stderr


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
