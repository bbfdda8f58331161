"""`bifolio embed` and `bifolio rerank`: the vectors and the order of `LLM`, and errors before the work."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from encoder_models import TEXTS, encoder_model

from bifolio import LLM
from bifolio.cli.main import build_app
from bifolio.errors import BifolioError
from cli_runner import CliRunner, Result

QUERY = "who runs"


@cache
def folder() -> str:
    return str(encoder_model("bert")[1])


@pytest.fixture
def texts(tmp_path: Path) -> str:
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(text.replace("\n", " ") for text in TEXTS if text.strip()) + "\n", encoding="utf-8")
    return str(path)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(build_app(), list(arguments), catch_exceptions=False)


def lines_of(path: str) -> list[str]:
    return Path(path).read_text(encoding="utf-8").splitlines()


def test_embed_writes_the_vectors_of_every_line(texts: str, tmp_path: Path) -> None:
    with LLM(folder()) as llm:
        expected = np.stack([result.outputs.data for result in llm.embed(lines_of(texts))])
    assert run("embed", texts, "-m", folder(), "-o", str(tmp_path / "v.npy")).exit_code == 0
    assert np.array_equal(np.load(tmp_path / "v.npy", allow_pickle=False), expected)
    printed = [json.loads(line) for line in run("embed", texts, "-m", folder()).stdout.splitlines()]
    assert [item["index"] for item in printed] == list(range(len(expected)))
    assert np.allclose([item["embedding"] for item in printed], expected)


def test_rerank_sorts_by_the_scores_of_the_model(texts: str) -> None:
    with LLM(folder()) as llm:
        scores = [result.outputs.score for result in llm.score(QUERY, lines_of(texts))]
    found = run("rerank", QUERY, texts, "-m", folder(), "--top-n", "2", "--json").stdout
    items = [json.loads(line) for line in found.splitlines()]
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[:2]
    assert [item["index"] for item in items] == best
    assert [item["text"] for item in items] == [lines_of(texts)[index] for index in best]
    assert np.allclose([item["score"] for item in items], [scores[index] for index in best])


def test_inputs_that_cannot_work_are_refused(texts: str) -> None:
    missing = run("embed", "none.txt", "-m", folder())
    assert (missing.exit_code, "none.txt does not exist" in missing.stderr) == (2, True)
    named = run("embed", texts, "-m", folder(), "-o", "vectors.csv")
    assert (named.exit_code, "name a .npy file" in named.stderr) == (2, True)
    with pytest.raises(BifolioError, match="dimensions is 5000: the vectors of this model have"):
        run("embed", texts, "-m", folder(), "--dimensions", "5000")


def test_inspect_says_that_attention_has_both_directions() -> None:
    shown = run("inspect", folder()).stdout
    assert "in both directions" in shown
    assert "of others" not in shown


def test_verbs_for_models_that_generate_refuse_an_encoder_in_one_line(texts: str, tmp_path: Path) -> None:
    """And write nothing."""
    model, target = folder(), tmp_path / "target"
    words = {
        "no language head": [
            ["profile", "-m", model],
            ["train", "--lora", model, "--data", texts, "--output", str(target)],
            ["train", "--eagle", model, "--data", texts, "--output", str(target)],
            ["generate", "hi", "-m", model],
            ["eval", "-m", model, texts],
        ],
        "without a language head are not written to folders": [["quantize", model, str(target), "-f", "bf16"]],
        "LanguageModel holds decoders": [
            ["train", "--data", texts, "--teacher", model, "--steps", "1", "--context", "8", "--output", str(target)]
        ],
    }
    for sentence, calls in words.items():
        for call in calls:
            try:
                output = run(*call).output
            except BifolioError as error:  # which the command prints in one line
                output = str(error)
            assert sentence in output, (call, output)
    assert not list(tmp_path.glob("target*"))
