"""`bifolio inspect --quant`."""

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
