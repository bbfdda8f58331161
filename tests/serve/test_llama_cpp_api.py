"""`/completion`, `/props` and `/slots` as clients of llama.cpp's server use them."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from serving import RunningServer, running_server, sse_events

BODY: dict[str, Any] = {"prompt": "Once upon", "n_predict": 8, "temperature": 0.0, "cache_prompt": True}


def ask(server: RunningServer, **options: Any) -> Any:
    with server.http() as http:
        answer = http.post("/completion", json={**BODY, **options})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_completion(server: RunningServer) -> None:
    answer = ask(server, return_tokens=True)
    with server.http() as http:
        same = http.post("/v1/completions", json={"prompt": "Once upon", "max_tokens": 8, "temperature": 0}).json()
    assert answer["content"] == same["choices"][0]["text"]
    assert answer["stop"] is True
    assert answer["tokens_predicted"] == len(answer["tokens"]) == same["usage"]["completion_tokens"]
    assert answer["tokens_evaluated"] == same["usage"]["prompt_tokens"]
    assert answer["stop_type"] in ("limit", "eos")


def test_a_stream_is_the_whole(server: RunningServer) -> None:
    with server.http() as http:
        events = sse_events(http.post("/completion", json={**BODY, "stream": True}).text)
    assert "".join(event["content"] for event in events) == ask(server)["content"]
    assert [event["stop"] for event in events] == [*[False] * (len(events) - 1), True]
    assert events[-1]["timings"]["predicted_n"] <= 8


def test_prompts_as_tokens(server: RunningServer) -> None:
    with server.http() as http:
        tokens = http.post("/tokenize", json={"prompt": "Once upon"}).json()["tokens"]
    assert ask(server, prompt=tokens)["content"] == ask(server)["content"]


def test_options(server: RunningServer) -> None:
    options: dict[str, Any] = {"seed": 5, "temperature": 1.0, "top_k": 10, "repeat_penalty": 1.1, "min_p": 0.01,
                               "samplers": ["top_k", "temperature"], "logit_bias": [[0, -100]]}  # fmt: skip
    assert ask(server, **options)["content"] == ask(server, **options)["content"]


def test_a_stop_text(server: RunningServer) -> None:
    text = ask(server, n_predict=30)["content"]
    answer = ask(server, n_predict=30, stop=[text[3:5]])
    assert (answer["stop_type"], answer["stopping_word"]) == ("word", text[3:5])


def test_a_schema(server: RunningServer) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"],
              "additionalProperties": False}  # fmt: skip
    assert json.loads(ask(server, json_schema=schema, n_predict=40)["content"])["n"] in (1, 2)


def test_props_and_slots(server: RunningServer) -> None:
    with server.http() as http:
        props, slots = http.get("/props").json(), http.get("/slots").json()
    assert props["total_slots"] == len(slots) == 8
    assert "messages" in props["chat_template"]
    assert props["default_generation_settings"]["n_ctx"] == 512
    assert not any(slot["is_processing"] for slot in slots)


@pytest.mark.parametrize("options", [{"prompt": 5}, {"n_predict": "x"}, {"grammar": "root ::= x"}, {"n_probs": 3},
                                     {"prompt": []}, {"strange": 1}, {"model": "other"}])  # fmt: skip
def test_errors_have_llama_cpps_shape(server: RunningServer, options: dict[str, Any]) -> None:
    with server.http() as http:
        answer = http.post("/completion", json={**BODY, **options})
    assert answer.status_code in (400, 404)
    error = answer.json()["error"]
    assert error["code"] == answer.status_code
    assert error["message"]
    assert error["type"]


@pytest.mark.full
def test_slots_hide_the_requests_of_other_keys() -> None:
    with running_server(keys=["first-secret-key", "second-secret-key"]) as server:
        stop = threading.Event()

        def load() -> None:
            with server.http("first-secret-key") as http:
                while not stop.is_set():
                    http.post("/completion", json={**BODY, "n_predict": 400, "ignore_eos": True})

        thread = threading.Thread(target=load)
        thread.start()
        own: list[Any] = []
        seen: list[Any] = []
        with server.http("first-secret-key") as http, server.http("second-secret-key") as other:
            for _ in range(200):
                own += [slot for slot in http.get("/slots").json() if slot["is_processing"]]
                seen += [slot for slot in other.get("/slots").json() if slot["is_processing"]]
                if own and seen:
                    break
        stop.set()
        thread.join()
        assert own[0]["n_prompt_tokens"] > 0
        assert {(slot["id_task"], slot["n_prompt_tokens"]) for slot in seen} == {("", 0)}


def test_samplers_that_a_list_leaves_out_are_off(server: RunningServer) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "seed": 3, "top_k": 1}
    alone = ask(server, **options, samplers=["temperature"])
    assert alone["content"] == ask(server, **{**options, "top_k": 0}, top_p=1.0, min_p=0.0)["content"]
    assert ask(server, **options, samplers=["top_k"])["content"] == ask(server)["content"]
    with server.http() as http:
        error = http.post("/completion", json={**BODY, "samplers": ["top_kk"]}).json()["error"]["message"]
        assert "did you mean 'top_k'" in error
        error = http.post("/completion", json={**BODY, "mirostat": 2}).json()["error"]["message"]
    assert error == "mirostat is not supported: leave it out, or pass 0"


def test_an_answer_of_named_fields(server: RunningServer) -> None:
    answer = ask(server, response_fields=["content", "timings/prompt_n"])
    assert answer == {"content": ask(server)["content"], "prompt_n": answer["prompt_n"]}
