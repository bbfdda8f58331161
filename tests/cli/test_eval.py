"""`bifolio eval`: the number that transformers computes."""

from __future__ import annotations

import json
import lzma
import math
from pathlib import Path

import pytest

from adapter_files import adapter_folder
from bifolio.cli.main import build_app
from bifolio.errors import BifolioError
from bifolio.model.loader import load_model
from cli_runner import CliRunner
from helpers import CORPUS, tiny_folder

TEXT = " ".join(CORPUS) * 3
WINDOW = 40


def bifolio(*arguments: str | Path) -> str:
    result = CliRunner().invoke(build_app(), ["eval", *(str(argument) for argument in arguments)])
    if isinstance(result.exception, BifolioError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def folder() -> Path:
    return tiny_folder(tokenizer=True)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def expected(folder: Path, start: list[int], ids: list[int]) -> tuple[float, int]:
    """Perplexity by transformers, over the same windows."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).float().eval()
    total, count = 0.0, 0
    length = WINDOW - len(start)
    for begin in range(0, len(ids), length):
        window = torch.tensor([[*start, *ids[begin : begin + length]]])
        if window.shape[1] > 1:
            with torch.no_grad():
                loss = model(window, labels=window).loss.item()
            total += loss * (window.shape[1] - 1)
            count += window.shape[1] - 1
    return math.exp(total / count), count


@pytest.mark.full
def test_an_adapter_predicts_as_the_merged_model_does(folder: Path, text: Path, tmp_path: Path) -> None:
    adapter, merged = adapter_folder(folder), tmp_path / "merged"
    CliRunner().invoke(build_app(), ["merge", str(folder), str(merged), "--lora", str(adapter), "--format", "f32"])
    plain, apart, whole = (
        json.loads(bifolio(text, "--json", "--window", "40", *given))["perplexity"]
        for given in (["-m", folder], ["-m", folder, "--lora", adapter], ["-m", merged])
    )
    assert apart == pytest.approx(whole, rel=1e-4)
    assert apart != pytest.approx(plain, rel=1e-3)


@pytest.mark.full
def test_the_value_of_transformers(folder: Path, text: Path) -> None:
    tokenizer = load_model(folder).require_tokenizer()
    start = tokenizer.encode("")
    value, count = expected(folder, start if len(start) == 1 else [], tokenizer.encode(TEXT, add_special_tokens=False))
    assert count > 3 * WINDOW
    record = json.loads(bifolio(text, "--model", folder, "--window", str(WINDOW), "--json"))
    assert record["perplexity"] == pytest.approx(value, rel=1e-3)
    assert record["loss"] == pytest.approx(math.log(value), abs=1e-3)
    assert (record["tokens"], record["window"]) == (count, WINDOW)


@pytest.mark.full
def test_a_trained_model_and_its_beginning_of_text(text: Path, tmp_path: Path) -> None:
    """`stories` begins every window with its separator; compressed text is the same text."""
    (tmp_path / "text.xz").write_bytes(lzma.compress(TEXT.encode()))
    first = json.loads(bifolio(text, "--json", "-n", "100", "--window", "30"))
    again = json.loads(bifolio(tmp_path / "text.xz", "--json", "-n", "100", "--window", "30"))
    assert first["perplexity"] == again["perplexity"]
    assert first["tokens"] == 100  # also the first token of a window is predicted, from the separator
    shown = bifolio(text, "-n", "100", "--window", "30")
    assert f"perplexity {first['perplexity']:.4f}" in shown


@pytest.mark.parametrize("window", ["1", "0", "-3", "100000"])
def test_impossible_windows(folder: Path, text: Path, window: str) -> None:
    with pytest.raises(BifolioError, match="window"):
        bifolio(text, "-m", folder, "--window", window)


def test_texts_that_cannot_be_scored(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(BifolioError, match="does not exist"):
        bifolio(tmp_path / "none.txt", "-m", folder)
    (tmp_path / "bad.xz").write_bytes(b"no archive")
    with pytest.raises(BifolioError, match="cannot be read"):
        bifolio(tmp_path / "bad.xz", "-m", folder)
    (tmp_path / "empty.txt").write_bytes(b"")
    with pytest.raises(BifolioError, match="too short"):
        bifolio(tmp_path / "empty.txt", "-m", folder)
