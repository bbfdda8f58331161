"""Fill-in-the-middle over HTTP: OpenAI's `suffix`, llama.cpp's `/infill` and ollama's `suffix`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from serving import TEMPLATE, RunningServer, running_server, sse_events

from bifolio.model.loader import open_model
from infill_models import CODESTRAL, infill_folder

GAP: dict[str, Any] = {"prompt": "Once upon", "suffix": " a quiet wood.", "max_tokens": 10, "temperature": 0}
INFILL: dict[str, Any] = {"input_prefix": "Once\n", "input_suffix": "\n wood.", "n_predict": 10, "temperature": 0}
FILES = [{"filename": "a.txt", "text": "The fox\n"}, {"text": "The sea\n"}]


@pytest.fixture(scope="module")
def coder() -> Iterator[RunningServer]:
    with running_server(engine={"model": str(infill_folder(chat_template=TEMPLATE))}) as running:
        yield running


def post(server: RunningServer, path: str, body: dict[str, Any], status: int = 200) -> Any:
    with server.http() as http:
        answer = http.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def tokens_of(server: RunningServer, text: str) -> list[int]:
    """A text in which the names of special tokens are these tokens."""
    return post(server, "/tokenize", {"prompt": text})["tokens"]  # type: ignore[no-any-return]


def test_a_suffix_of_openai(coder: RunningServer) -> None:
    answer = post(coder, "/v1/completions", {**GAP, "return_token_ids": True})["choices"][0]
    expected = tokens_of(coder, "<|fim_prefix|>Once upon<|fim_suffix|> a quiet wood.<|fim_middle|>")
    assert answer["prompt_token_ids"] == expected
    same = post(coder, "/v1/completions", {**GAP, "suffix": None, "prompt": expected})["choices"][0]
    assert same["text"] == answer["text"]
    several = post(coder, "/v1/completions", {**GAP, "prompt": ["Once upon", "The fox"]})["choices"]
    assert several[0]["text"] == answer["text"] != several[1]["text"]


def test_a_mark_ends_the_output(coder: RunningServer) -> None:
    (mark,) = tokens_of(coder, "<|fim_pad|>")
    push = {"logit_bias": {str(mark): 1000}}
    answer = post(coder, "/v1/completions", {**GAP, **push, "return_token_ids": True})["choices"][0]
    assert (answer["text"], answer["finish_reason"], answer["token_ids"]) == ("", "stop", [mark])
    endless = post(coder, "/v1/completions", {**GAP, **push, "ignore_eos": True})
    assert endless["usage"]["completion_tokens"] == 10
    infill = post(coder, "/infill", {**INFILL, "logit_bias": [[mark, 1000]]})
    assert (infill["content"], infill["stop_type"], infill["tokens_predicted"]) == ("", "eos", 1)


def test_infill_of_llama_cpp(coder: RunningServer) -> None:
    answer = post(coder, "/infill", {**INFILL, "prompt": "upon", "input_extra": FILES})
    expected = (
        "<|repo_name|>myproject\n<|file_sep|>a.txt\nThe fox\n<|file_sep|>tmp\nThe sea\n<|file_sep|>filename\n"
        "<|fim_prefix|>Once\nupon<|fim_suffix|>\n wood.<|fim_middle|>"
    )
    same = post(coder, "/v1/completions", {"prompt": expected, "max_tokens": 10, "temperature": 0})
    assert answer["content"] == same["choices"][0]["text"]
    assert answer["tokens_evaluated"] == same["usage"]["prompt_tokens"]
    assert answer["truncated"] is False
    with coder.http() as http:
        events = sse_events(
            http.post("/infill", json={**INFILL, "prompt": "upon", "input_extra": FILES, "stream": True}).text
        )
    assert "".join(event["content"] for event in events) == answer["content"]


def test_an_infill_that_does_not_fit_is_cut_and_says_so(coder: RunningServer) -> None:
    answer = post(coder, "/infill", {**INFILL, "input_extra": [{"text": "The fox liked to read. " * 200}]})
    assert answer["truncated"] is True
    assert answer["tokens_evaluated"] == 512 - 10


def test_a_suffix_of_ollama(coder: RunningServer) -> None:
    options = {"num_predict": 10, "temperature": 0}
    body: dict[str, Any] = {
        "model": "tiny",
        "prompt": "Once upon",
        "suffix": " a quiet wood.",
        "options": options,
        "stream": False,
    }
    answer = post(coder, "/api/generate", body)
    assert answer["response"] == post(coder, "/v1/completions", GAP)["choices"][0]["text"]
    refused = post(coder, "/api/generate", {**body, "system": "Be brief."}, 400)
    assert "system prompt" in refused["error"]


@pytest.mark.parametrize("suffix", [" wood.", ""])
def test_a_suffix_and_echo(coder: RunningServer, suffix: str) -> None:
    answer = post(coder, "/v1/completions", {**GAP, "suffix": suffix, "echo": True}, 400 if suffix else 200)
    if suffix:
        assert "echo" in answer["error"]["message"]
    else:
        assert answer["choices"][0]["text"].startswith(GAP["prompt"])


def test_a_model_without_marks_says_what_to_do(server: RunningServer) -> None:
    for path, body in (
        ("/v1/completions", GAP),
        ("/infill", INFILL),
        ("/api/generate", {"model": "tiny", "prompt": "a", "suffix": "b", "stream": False}),
    ):
        error = post(server, path, body, 400)["error"]
        message = error if isinstance(error, str) else error["message"]
        assert "cannot fill in the middle" in message
        assert "leave the suffix out, or use a model such as Qwen2.5-Coder" in message


@pytest.mark.full
def test_a_model_that_wants_the_suffix_first() -> None:
    folder = infill_folder(CODESTRAL)
    with running_server(engine={"model": str(folder)}) as server:
        answer = post(server, "/v1/completions", {**GAP, "return_token_ids": True})["choices"][0]
    tokenizer = open_model(folder).text.require_tokenizer()
    assert tokenizer.decode(answer["prompt_token_ids"], False) == "[SUFFIX] a quiet wood.[PREFIX]Once upon"
