"""Two servers, one for prefill and one for decode: answers are those of one server, and a lost one costs time only."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
from serving import RunningServer, running_server

from bifolio.config.transfer import TransferSettings
from helpers import random_prompt

pytestmark = pytest.mark.full
ENGINE = {"kernels": "native", "threads": 1}  # blocks of prompts give the bits of a computation on the native kernels
SECRET = "shared-by-both"


@pytest.fixture(scope="module")
def prefill() -> Iterator[RunningServer]:
    with running_server(engine=ENGINE, transfer=TransferSettings("prefill", secret=SECRET)) as server:
        yield server


@pytest.fixture(scope="module")
def decode(prefill: RunningServer) -> Iterator[RunningServer]:
    settings = TransferSettings("decode", prefill_addresses=(f"127.0.0.1:{prefill.port}",), secret=SECRET)
    with running_server(engine=ENGINE, transfer=settings) as server:
        yield server


@pytest.fixture(scope="module")
def single() -> Iterator[RunningServer]:
    with running_server(engine=ENGINE) as server:
        yield server


def body(seed: int, length: int = 120, **options: Any) -> dict[str, Any]:
    prompt = random_prompt(length, seed=seed, vocab_size=250)
    return {"prompt": prompt, "max_tokens": 12, "temperature": 0.8, "seed": seed, "ignore_eos": True, **options}


def ask(server: RunningServer, request: dict[str, Any], **headers: str) -> dict[str, Any]:
    with server.http() as http:
        answer = http.post("/v1/completions", json=request, headers=headers)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def computed(server: RunningServer) -> float:
    """Prompt tokens that the engine has computed."""
    return (
        asyncio.run_coroutine_threadsafe(server.context.engine.snapshot(), server.loop)
        .result(10)
        .stats["num_prefill_tokens"]
    )


def test_answers_are_those_of_one_server(prefill: RunningServer, decode: RunningServer, single: RunningServer) -> None:
    before = computed(prefill)
    for seed in range(3):
        wanted, found = ask(single, body(seed, logprobs=2)), ask(decode, body(seed, logprobs=2))
        assert found["choices"] == wanted["choices"]
        assert cached(found) == 119 // 8 * 8  # the decode engine computed the last tokens alone
    assert computed(prefill) - before == 3 * 120


def test_short_prompts_stay(prefill: RunningServer, decode: RunningServer) -> None:
    before = computed(prefill)
    assert cached(ask(decode, body(50, length=40))) == 0
    assert computed(prefill) == before


def test_streams_chats_and_grammars(decode: RunningServer, single: RunningServer) -> None:
    text = "Once upon a time a little fox lived in a quiet wood. " * 6
    options: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 10, "seed": 1}
    answers = []
    for server in (decode, single):
        client = server.client()
        stream = client.chat.completions.create(messages=[{"role": "user", "content": text}], stream=True, **options)
        whole = client.completions.create(
            prompt=text, extra_body={"structured_outputs": {"regex": "(fox|sea)+"}}, **options
        )
        answers.append(("".join(chunk.choices[0].delta.content or "" for chunk in stream), whole.choices[0].text))
    assert answers[0] == answers[1]


def test_fields_of_gateways(prefill: RunningServer, decode: RunningServer, single: RunningServer) -> None:
    """A router asks the prefill server first and hands its `kv_transfer_params` to the decode server."""
    first = ask(prefill, body(60, max_tokens=1, kv_transfer_params={"do_remote_decode": True}))
    params = first["kv_transfer_params"]
    assert params["do_remote_prefill"] is True
    assert params["remote_host"] == "127.0.0.1"
    before = computed(prefill)
    found = ask(decode, body(60, kv_transfer_params=params))
    assert found["choices"] == ask(single, body(60))["choices"]
    assert cached(found) == 112
    assert computed(prefill) == before  # its blocks were cached
    assert "kv_transfer_params" not in found
    header = {"x-prefiller-host-port": f"127.0.0.1:{prefill.port}"}
    assert cached(ask(decode, body(61), **header)) == 112


@pytest.mark.parametrize(
    "choice",
    [
        {"headers": {"x-prefiller-host-port": "127.0.0.1:1"}},
        {"params": {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 1}},
        {"params": {"do_remote_prefill": True, "remote_host": "example.org", "remote_port": "x"}},
    ],
)
def test_no_client_chooses_an_address(decode: RunningServer, choice: dict[str, Any]) -> None:
    found = ask(decode, body(70, kv_transfer_params=choice.get("params")), **choice.get("headers", {}))
    assert cached(found) in (0, 112)  # computed here, or cached by the test before
    assert found["choices"][0]["finish_reason"] == "length"


def test_a_server_without_blocks_says_so(decode: RunningServer, prefill: RunningServer) -> None:
    with decode.http() as http:
        assert http.get("/kv_transfer").status_code == 404
    with prefill.http() as http:
        assert http.get("/kv_transfer").json()["remote_port"] > 0


def test_an_aborted_request_is_not_started(decode: RunningServer) -> None:
    with decode.http() as http, http.stream("POST", "/v1/completions", json=body(80, stream=True)):
        pass  # gone at once
    assert decode.wait_idle()["num_used_blocks"] == 0


def test_a_killed_prefill_engine_costs_a_computation(
    prefill: RunningServer, decode: RunningServer, single: RunningServer
) -> None:
    """Requests while the prefill engine is killed and restarted: every answer is right."""
    wanted = [ask(single, body(seed))["choices"] for seed in range(90, 96)]
    hello = prefill.context.engine.hello
    assert hello is not None
    os.kill(hello.pid, signal.SIGKILL)
    assert [ask(decode, body(seed))["choices"] for seed in range(90, 93)] == wanted[:3]
    end = time.monotonic() + 30
    with prefill.http() as http:
        while http.get("/ready").status_code != 200:
            assert time.monotonic() < end
            time.sleep(0.05)
    time.sleep(5.1)  # the decode server leaves a silent server out for five seconds
    found = [ask(decode, body(seed)) for seed in range(93, 96)]
    assert [answer["choices"] for answer in found] == wanted[3:]
    assert cached(found[-1]) == 112  # blocks come again, from the new port
