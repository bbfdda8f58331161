"""Torch is optional: running a model on the CPU imports none of it, and needs none of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from helpers import tiny_folder, tiny_model, tiny_tokenizer

FORBIDDEN = ("torch", "transformers", "triton", "matplotlib")
GUARD = f"""
import sys

class Guard:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {FORBIDDEN!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Guard())
"""
VERBS = {"generate": ["Once upon a time", "--max-tokens", "4", "-t", "0"], "inspect": []}


def run_guarded(code: str, *arguments: str) -> str:
    """Run code where an import of torch fails as if it were not installed."""
    command = [sys.executable, "-c", GUARD + code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def saved() -> Path:
    """A folder written by transformers, with a tokenizer."""
    _, folder = tiny_model("llama", vocab_size=320)
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.full
@pytest.mark.parametrize("verb", VERBS)
def test_a_folder_by_transformers_runs_without_torch(verb: str, saved: Path) -> None:
    options = ["--model", str(saved)] if verb == "generate" else [str(saved)]
    code = "import sys; from bifolio.cli.main import main; sys.argv = ['bifolio', *sys.argv[1:]]; main()"
    printed = run_guarded(code, verb, *options, *VERBS[verb])
    assert printed.strip() if verb == "generate" else "llama" in printed


@pytest.mark.full
@pytest.mark.parametrize("verb", VERBS)
def test_torch_is_not_imported_where_it_is_installed(verb: str, saved: Path) -> None:
    options = ["--model", str(saved)] if verb == "generate" else [str(saved)]
    code = (
        "import sys; from bifolio.cli.main import build_app\n"
        "build_app()(sys.argv[1:])\n"
        f"print('imported:', [name for name in {FORBIDDEN!r} if name in sys.modules])"
    )
    command = [sys.executable, "-c", code, verb, *options, *VERBS[verb]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("imported: []\n")


def test_importing_the_package_costs_next_to_nothing() -> None:
    code = "import bifolio, sys; print(sorted({'numpy', 'tokenizers', 'jinja2', 'torch', 'rich'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.full
def test_the_offline_api_runs_on_the_reference_without_torch(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "m", tokenizer=True)
    code = """
from bifolio import LLM, SamplingParams
llm = LLM(sys.argv[1], kernels="reference", max_model_len=64)
outputs = llm.generate(["Once upon", [5, 6]], SamplingParams(max_tokens=5, n=2, seed=1, ignore_eos=True, logprobs=1))
print(sum(len(completion.token_ids) for output in outputs for completion in output.outputs))
"""
    assert run_guarded(code, str(folder)) == "20\n"


def test_every_public_name_is_there() -> None:
    import bifolio

    for name in bifolio.__all__:
        assert getattr(bifolio, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = bifolio.nonsense
