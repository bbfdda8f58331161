"""`bifolio inspect --quant` and `bifolio bench formats`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bifolio.cli.main import build_app
from bifolio.kernels.native.formats import PACKINGS
from exotic_weights import k_quant_llama


def test_inspect_quant_shows_the_form_of_each_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = k_quant_llama(tmp_path / "k.gguf", tied=False)
    build_app(["inspect"])(["inspect", str(path), "--quant", "--json"])
    rows = {(row["format"], row["kind"]): row for row in json.loads(capsys.readouterr().out)["formats"]}
    assert set(rows) == {("Q4_K", "matrices"), ("Q6_K", "matrices"), ("Q5_0", "matrices"), ("F32", "vectors")}
    four = rows["Q4_K", "matrices"]
    becomes, held = PACKINGS["Q4_K"]
    assert (four["tensors"], four["bits"], four["held_bits"]) == (10, 4.5, held)
    assert four["held_bytes"] * 4.5 == four["bytes"] * held
    assert four["becomes"] == becomes
    build_app(["inspect"])(["inspect", str(path), "--quant"])
    shown = capsys.readouterr().out
    assert "Q6_K" in shown
    assert "6 bits, a scale for 16" in shown


@pytest.mark.full
def test_bench_formats_measures_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "t.txt"
    text.write_text("Tom had a red ball. He threw it to Lily and she laughed. " * 20)
    picture = tmp_path / "p.png"
    build_app(["bench"])([
        "bench", "formats", "-m", "stories", "--formats", "q4_k_m,q8_0", "--text", str(text), "-p", "16", "-n", "4",
        "-r", "1", "--tokens", "128", "--threads", "1", "--plot", str(picture), "--json",
    ])  # fmt: skip
    rows = json.loads(capsys.readouterr().out)["formats"]
    assert [row["format"] for row in rows] == ["q4_k_m", "q8_0"]
    assert rows[0]["file_bytes"] < rows[1]["file_bytes"]
    assert all(row["prefill"] > 0 and row["decode"] > 0 for row in rows)
    assert 0.8 < rows[0]["perplexity"] / rows[1]["perplexity"] < 1.25
    assert picture.stat().st_size > 1000
