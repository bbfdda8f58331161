"""ollama's own client against `/api`."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from serving import RunningServer, running_server

from bifolio import __version__
from helpers import tiny_folder

pytestmark = pytest.mark.full  # each module starts a server

ollama = pytest.importorskip("ollama")
USER: list[Any] = [{"role": "user", "content": "Hello"}]
SHORT = {"num_predict": 10, "temperature": 0.0}
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9, "minimum": 0}}, "required": ["n"],
          "additionalProperties": False}  # fmt: skip
TOOLS: list[Any] = [{"type": "function", "function": {"name": "now", "description": "The time.",
                                                      "parameters": {"type": "object", "properties": {}}}}]  # fmt: skip


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Any:
    return ollama.Client(host=server.url, timeout=60)


def test_chat(client: Any) -> None:
    answer = client.chat(model="tiny", messages=USER, options=SHORT)
    assert (answer.model, answer.done, answer.message.role) == ("tiny", True, "assistant")
    assert answer.message.content
    assert answer.eval_count <= 10
    assert answer.prompt_eval_count > 3
    assert answer.done_reason in ("stop", "length")


def test_a_chat_stream_is_the_whole(client: Any) -> None:
    whole = client.chat(model="tiny", messages=USER, options=SHORT).message.content
    chunks = list(client.chat(model="tiny", messages=USER, options=SHORT, stream=True))
    assert "".join(chunk.message.content for chunk in chunks) == whole
    assert [chunk.done for chunk in chunks] == [*[False] * (len(chunks) - 1), True]
    assert chunks[-1].eval_count <= 10
    assert chunks[-1].total_duration > 0


def test_generate(client: Any) -> None:
    answer = client.generate(model="tiny", prompt="Once", options=SHORT)
    assert answer.done
    assert answer.response
    assert answer.context is None


def test_a_generate_stream_is_the_whole(client: Any) -> None:
    whole = client.generate(model="tiny", prompt="Once", options=SHORT).response
    chunks = list(client.generate(model="tiny", prompt="Once", options=SHORT, stream=True))
    assert "".join(chunk.response for chunk in chunks) == whole


def test_raw_and_system_prompts(client: Any) -> None:
    raw = client.generate(model="tiny", prompt="Once", raw=True, options=SHORT)
    chat = client.generate(model="tiny", prompt="Once", options=SHORT)
    system = client.generate(model="tiny", prompt="Once", system="Be kind.", options=SHORT)
    assert raw.prompt_eval_count < chat.prompt_eval_count < system.prompt_eval_count


def test_formats(client: Any) -> None:
    answer = client.generate(model="tiny", prompt="Once", format=SCHEMA, options={"num_predict": 60})
    assert 0 <= json.loads(answer.response)["n"] <= 9
    answer = client.chat(model="tiny", messages=USER, format="json", options={"num_predict": 30})
    assert answer.message.content.startswith("{")


def test_options(client: Any) -> None:
    options = {"num_predict": 8, "seed": 3, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "repeat_penalty": 1.1,
               "stop": ["\n\n"], "num_ctx": 512}  # fmt: skip
    first = client.generate(model="tiny", prompt="Once", options=options)
    assert first.response == client.generate(model="tiny", prompt="Once", options=options).response


def test_tools_are_shown(client: Any) -> None:
    plain = client.chat(model="tiny", messages=USER, options=SHORT)
    shown = client.chat(model="tiny", messages=USER, tools=TOOLS, options=SHORT)
    assert shown.prompt_eval_count > plain.prompt_eval_count


def test_results_of_tools(client: Any) -> None:
    messages = [*USER, {"role": "assistant", "tool_calls": [{"function": {"name": "now", "arguments": {}}}]},
                {"role": "tool", "tool_name": "now", "content": "noon"}]  # fmt: skip
    assert client.chat(model="tiny", messages=messages, tools=TOOLS, options=SHORT).done


def test_embeddings(client: Any) -> None:
    answer = client.embed(model="tiny", input=["Once", "The fox"])
    assert len(answer.embeddings) == 2
    assert np.allclose(np.linalg.norm(answer.embeddings, axis=1), 1, atol=1e-5)
    assert client.embed(model="tiny", input="Once").embeddings[0] == answer.embeddings[0]


def test_list_show_and_ps(client: Any) -> None:
    assert [model.model for model in client.list().models] == ["tiny"]
    shown = client.show("tiny")
    assert shown.details.family == "llama"
    assert "tools" in shown.capabilities
    assert shown.modelinfo["general.architecture"] == "llama"
    assert client.ps().models[0].model == "tiny"


def test_version(server: RunningServer) -> None:
    with server.http() as http:
        assert http.get("/api/version").json() == {"version": __version__}


def test_pull_reports_progress(client: Any) -> None:
    assert client.pull("tiny").status == "success"
    assert [line.status for line in client.pull("tiny", stream=True)] == ["pulling manifest", "success"]


def test_pull_of_another_model_is_refused(client: Any) -> None:
    with pytest.raises(ollama.ResponseError, match="--allow-pull") as caught:
        client.pull("smollm2")
    assert caught.value.status_code == 403


def test_loading(client: Any) -> None:
    assert client.generate(model="tiny").done_reason == "load"
    assert client.chat(model="tiny:latest", messages=[]).done_reason == "load"


@pytest.mark.parametrize(
    ("call", "options", "status"),
    [
        ("generate", {"model": "other", "prompt": "x"}, 404),
        ("generate", {"model": "tiny", "prompt": "x", "suffix": "y"}, 400),
        ("generate", {"model": "tiny", "prompt": "x", "options": {"temperature": -1}}, 400),
        ("chat", {"model": "tiny", "messages": USER, "think": True}, 400),
        ("embed", {"model": "other", "input": "x"}, 404),
        ("show", {"model": "other"}, 404),
    ],
)
def test_errors_have_ollamas_shape(client: Any, call: str, options: dict[str, Any], status: int) -> None:
    with pytest.raises(ollama.ResponseError) as caught:
        getattr(client, call)(**options)
    assert caught.value.status_code == status
    assert caught.value.error


@pytest.mark.full
def test_a_pull_with_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    from bifolio.model import pull

    def fetch(name: str, progress: Any) -> None:
        assert name == "another"
        progress(5, 10)

    monkeypatch.setattr(pull, "pull", fetch)
    with running_server(allow_pull=True) as server:
        lines = list(ollama.Client(host=server.url).pull("another", stream=True))
    assert [line.status for line in lines] == ["pulling manifest", "pulling another", "success"]
    assert (lines[1].completed, lines[1].total) == (5, 10)


@pytest.mark.full
def test_a_model_without_a_template() -> None:
    folder = tiny_folder(tokenizer=True, max_position_embeddings=512)
    with running_server(engine={"model": str(folder)}) as server:
        client = ollama.Client(host=server.url)
        assert client.generate(model="tiny", prompt="Once", system="Be kind.", options=SHORT).response
        with pytest.raises(ollama.ResponseError, match="template"):
            client.chat(model="tiny", messages=USER)


def test_logprobs(server: RunningServer) -> None:
    """Whole and in a stream, with and without the template."""
    body: dict[str, Any] = {"model": "tiny", "logprobs": True, "top_logprobs": 2,
                            "options": {"num_predict": 4, "temperature": 0}}  # fmt: skip
    messages = [{"role": "user", "content": "Hi"}]
    with server.http() as http:
        for path, prompt in (
            ("/api/generate", {"prompt": "Once"}),
            ("/api/generate", {"prompt": "Once", "raw": True}),
            ("/api/chat", {"messages": messages}),
        ):
            whole = http.post(path, json={**body, **prompt, "stream": False}).json()["logprobs"]
            lines = http.post(path, json={**body, **prompt, "stream": True}).text.splitlines()
            streamed = [item for line in lines for item in json.loads(line).get("logprobs", [])]
            assert [item["token"] for item in streamed] == [item["token"] for item in whole]
            assert len(whole) == 4
            assert all(item["logprob"] <= 0 and len(item["top_logprobs"]) == 2 for item in whole)
