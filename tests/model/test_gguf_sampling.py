"""Sampling defaults and other small things that a GGUF file carries along."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import pytest

from bifolio import LLM
from bifolio.model.gguf.sampling import generation_config_from, sampling_entries
from bifolio.model.gguf.writer import write_gguf
from bifolio.model.loader import load_model
from bifolio.quant.formats import QuantFormat
from helpers import tiny_folder

DEFAULTS = {"temperature": 0.7, "top_p": 0.95, "top_k": 40, "min_p": 0.05, "repetition_penalty": 1.1}


def test_defaults_survive_the_file_and_lose_against_the_caller(tmp_path: Path) -> None:
    model = replace(load_model(tiny_folder(tokenizer=True)), generation_config={**DEFAULTS, "bos_token_id": 0})
    write_gguf(tmp_path / "m.gguf", model, QuantFormat.F32, extra={"general.license": "mit"})
    fields = gguf.GGUFReader(tmp_path / "m.gguf").fields
    assert fields[gguf.Keys.General.SAMPLING_TEMP].contents() == pytest.approx(0.7)
    assert fields[gguf.Keys.General.SAMPLING_TOP_K].contents() == 40
    assert fields[gguf.Keys.General.SAMPLING_PENALTY_REPEAT].contents() == pytest.approx(1.1)
    assert fields["general.license"].contents() == "mit"
    read = load_model(tmp_path / "m.gguf")
    assert read.generation_config == {**DEFAULTS, "do_sample": True}
    params = LLM(read, max_model_len=64).default_params(top_k=3)
    assert (params.temperature, params.top_p, params.top_k) == (0.7, 0.95, 3)
    write_gguf(tmp_path / "n.gguf", read, QuantFormat.F16)  # and from file to file, with the licence
    assert load_model(tmp_path / "n.gguf").generation_config == read.generation_config
    assert gguf.GGUFReader(tmp_path / "n.gguf").fields["general.license"].contents() == "mit"


def test_greedy_models_say_so() -> None:
    entries = sampling_entries({"do_sample": False, "temperature": 0.9})
    assert entries == {"general.sampling.temp": 0.0}
    assert generation_config_from(entries) == {"temperature": 0.0, "do_sample": False}


def test_values_that_are_no_numbers_are_left_out() -> None:
    odd = {"general.sampling.temp": "hot", "general.sampling.top_p": float("nan"), "general.sampling.top_k": True}
    assert generation_config_from(odd) == {}
    assert sampling_entries({"temperature": None, "top_k": "many", "top_p": float("inf")}) == {}
