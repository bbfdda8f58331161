"""Adapters over HTTP: as models, beside each other in one batch."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from serving import RunningServer, model_folder, running_server, sse_events

from adapter_files import adapter_folder

ASK: dict[str, Any] = {"prompt": "Once upon", "max_tokens": 10, "temperature": 0}


@cache
def adapter(seed: int) -> Path:
    return adapter_folder(model_folder(), seed=seed)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    modules = {f"a{seed}": str(adapter(seed)) for seed in (1, 2)}
    with running_server(engine={"lora_modules": modules, "kernels": None}) as running:
        yield running


def post(server: RunningServer, path: str, body: dict[str, Any], status: int = 200) -> Any:
    with server.http() as http:
        answer = http.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def text(server: RunningServer, model: str | None, **options: Any) -> str:
    answer = post(server, "/v1/completions", {**ASK, "model": model, **options})
    assert answer["model"] == (model or "tiny")
    found: str = answer["choices"][0]["text"]
    return found


def test_each_adapter_is_a_model(server: RunningServer) -> None:
    texts = [text(server, name) for name in (None, "tiny", "a1", "a2")]
    assert texts[0] == texts[1]
    assert len(set(texts)) == 3
    with ThreadPoolExecutor(12) as pool:
        names = ["tiny", "a1", "a2"] * 4
        assert list(pool.map(lambda name: text(server, name), names)) == texts[1:] * 4
    with server.http() as http:
        listed = {card["id"]: card["parent"] for card in http.get("/v1/models").json()["data"]}
        assert listed == {"tiny": None, "a1": "tiny", "a2": "tiny"}
        assert http.get("/v1/models/a1").json()["parent"] == "tiny"
    refused = post(server, "/v1/completions", {**ASK, "model": "a3"}, 404)["error"]
    assert "'a3' does not exist; this server has 'tiny', 'a1', 'a2'" in refused["message"]
    refused = post(server, "/v1/embeddings", {"input": "x", "model": "a1"}, 400)["error"]
    assert "is an adapter" in refused["message"]


def test_every_protocol_takes_the_name_of_an_adapter(server: RunningServer) -> None:
    messages = [{"role": "user", "content": "a fox"}]
    chat = {"messages": messages, "max_tokens": 8, "temperature": 0}

    def openai(model: str) -> str:
        answer = post(server, "/v1/chat/completions", {**chat, "model": model})
        assert answer["model"] == model
        content: str = answer["choices"][0]["message"]["content"]
        return content

    expected = openai("a1")
    assert expected != openai("tiny")
    with server.http() as http:
        stream = http.post("/v1/chat/completions", json={**chat, "model": "a1", "stream": True})
    chunks = [event for event in sse_events(stream.text) if event != "[DONE]"]
    assert {chunk["model"] for chunk in chunks} == {"a1"}
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == expected
    anthropic = post(server, "/v1/messages", {**chat, "model": "a1"})
    assert (anthropic["content"][0]["text"], anthropic["model"]) == (expected, "a1")
    response = post(
        server, "/v1/responses", {"input": "a fox", "model": "a1", "max_output_tokens": 8, "temperature": 0}
    )
    assert response["output"][0]["content"][0]["text"] == expected
    ollama = {"model": "a1:latest", "messages": messages, "options": {"num_predict": 8, "temperature": 0},
              "stream": False}  # fmt: skip
    assert post(server, "/api/chat", ollama)["message"]["content"] == expected
