"""Sampling defaults: a model's own values win; otherwise filters by size, in every entry point."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bifolio import LLM, SamplingParams
from bifolio.cli.main import build_app
from bifolio.model.loader import open_text_model
from bifolio.model.sampling_defaults import LARGE_DEFAULTS, SMALL_DEFAULTS, sampling_defaults
from bifolio.sampling_params import merge_defaults
from cli_runner import CliRunner
from helpers import tiny_folder


def test_a_model_without_defaults_gets_filters_by_its_size() -> None:
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    assert sampling_defaults(ids, 7_000_000_000) == {**ids, **LARGE_DEFAULTS}
    assert sampling_defaults(ids, 135_000_000) == {**ids, **SMALL_DEFAULTS}
    assert (LARGE_DEFAULTS["temperature"], LARGE_DEFAULTS["top_k"]) == (0.8, 40)
    assert (LARGE_DEFAULTS["top_p"], LARGE_DEFAULTS["min_p"]) == (0.95, 0.05)
    assert SMALL_DEFAULTS["temperature"] < LARGE_DEFAULTS["temperature"]


@pytest.mark.parametrize("own", [{"temperature": 1.0}, {"do_sample": False}, {"do_sample": True}, {"top_k": 20}])
def test_values_of_the_model_are_left_alone(own: dict[str, object]) -> None:
    assert sampling_defaults({**own, "repetition_penalty": 1.1}, 10) == {**own, "repetition_penalty": 1.1}


def test_sampling_params_keep_their_published_defaults() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (1.0, 0, 1.0, 0.0)


def test_python_uses_them_without_parameters_and_explicit_values_win() -> None:
    llm = LLM(tiny_folder(tokenizer=True), max_model_len=32)
    (params,) = llm.params_for(["Once"], None)
    assert {name: getattr(params, name) for name in SMALL_DEFAULTS} == SMALL_DEFAULTS
    assert llm.default_params(temperature=1.0, top_k=0).temperature == 1.0
    assert llm.params_for(["Once"], SamplingParams())[0] == SamplingParams()


def test_the_embedded_model_brings_its_own() -> None:
    assert merge_defaults(open_text_model("stories").sampling_defaults) == {"temperature": 0.7, "top_p": 0.95}


@pytest.mark.parametrize("verb", ["generate", "chat"])
def test_help_shows_them(verb: str) -> None:
    text = " ".join(CliRunner().invoke(build_app([verb]), [verb, "--help"]).output.split())
    for name in SMALL_DEFAULTS:
        large, small = f"{LARGE_DEFAULTS[name]:g}", f"{SMALL_DEFAULTS[name]:g}"
        part = text.split("--" + name.replace("_", "-"), 1)[1][:160]
        assert f"the model's own, else {large}" in part
        assert large == small or f"below 1B parameters {small}" in part


def test_the_server_starts_from_them_and_shows_them() -> None:
    pytest.importorskip("msgspec")
    from bifolio.serve.http.sampling import engine_params, request_defaults
    from bifolio.serve.protocols.openai_types import ChatRequest

    text_model = open_text_model(tiny_folder(tokenizer=True))
    request = ChatRequest(messages=[])
    values = engine_params(request, text_model.sampling_defaults, max_tokens=None).values
    assert {name: values[name] for name in SMALL_DEFAULTS} == SMALL_DEFAULTS
    shown = request_defaults(text_model.sampling_defaults)
    expected = {**SMALL_DEFAULTS, "repetition_penalty": 1.0}
    assert {name: shown[name] for name in expected} == expected
    assert json.dumps(shown)


def test_chat_and_generate_draw_with_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[SamplingParams] = []
    original = LLM.stream

    def stream(self: LLM, prompts: object, params: SamplingParams) -> object:
        seen.append(params)
        return original(self, prompts, params)  # type: ignore[arg-type]

    monkeypatch.setattr(LLM, "stream", stream)
    folder = tiny_folder(tmp_path / "m", tokenizer=True, chat_template="{{ messages[-1].content }}")
    for command in (["generate", "-m", str(folder), "Once", "-n", "2"], ["chat", "-m", str(folder), "-n", "2"]):
        result = CliRunner().invoke(build_app(), command, input="Once\n", catch_exceptions=False)
        assert result.exit_code == 0
    assert len(seen) == 2
    for params in seen:
        assert {name: getattr(params, name) for name in SMALL_DEFAULTS} == SMALL_DEFAULTS
