"""`/v1/branches` (verbs, owners, limits, streams, times to live) and receipts, against a real server."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import ENGINE, RunningServer, model_folder, running_server, sse_events

from bifolio import LLM
from bifolio.api.receipts import read_receipt
from bifolio.measure.replay import replay
from bifolio.serve.process import text_branches

pytestmark = pytest.mark.full  # the module starts a server
KEYS = ["first-secret-key", "second-secret-key"]
PROMPT = "Once upon a time a little fox lived in a quiet wood."
GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(keys=KEYS) as running:
        yield running


@pytest.fixture(scope="module")
def http(server: RunningServer) -> Iterator[httpx.Client]:
    with server.http(KEYS[0]) as client:
        yield client


def post(http: httpx.Client, path: str, status: int = 200, **body: Any) -> dict[str, Any]:
    answer = http.post(path, json=body)
    assert answer.status_code == status, answer.text
    found: dict[str, Any] = answer.json()
    return found


def opened(http: httpx.Client, **body: Any) -> str:
    name: str = post(http, "/v1/branches", **{"prompt": PROMPT, **body})["id"]
    return name


def tokens_of(http: httpx.Client, name: str) -> list[int]:
    found: list[int] = http.get(f"/v1/branches/{name}").json()["token_ids"]
    return found


def test_generating_in_parts_is_generating_at_once(http: httpx.Client) -> None:
    whole = post(http, "/v1/completions", prompt=PROMPT, **{**GREEDY, "max_tokens": 16})["choices"][0]
    name = opened(http)
    parts = [post(http, f"/v1/branches/{name}/generate", **GREEDY)["choices"][0] for _ in range(2)]
    assert parts[0]["token_ids"] + parts[1]["token_ids"] == whole["token_ids"]
    assert parts[0]["text"] + parts[1]["text"] == whole["text"]
    card = http.get(f"/v1/branches/{name}").json()
    assert card["token_ids"][card["num_prompt_tokens"] :] == whole["token_ids"]
    assert http.delete(f"/v1/branches/{name}").json() == {"id": name, "deleted": True, "object": "branch"}
    assert http.get(f"/v1/branches/{name}").status_code == 404


def test_forks_share_blocks_and_go_their_own_ways(server: RunningServer, http: httpx.Client) -> None:
    name = opened(http)
    held = server.wait_idle()["num_used_blocks"]
    forks = [card["id"] for card in post(http, f"/v1/branches/{name}/fork", n=5)["data"]]
    assert server.wait_idle()["num_used_blocks"] == held
    for number, fork in enumerate(forks):
        post(http, f"/v1/branches/{fork}/append", prompt=f" The {number} fox")
    with ThreadPoolExecutor(5) as pool:
        answers = list(pool.map(lambda fork: post(http, f"/v1/branches/{fork}/generate", **GREEDY), forks))
    for fork, answer in zip(forks, answers, strict=True):
        found, tokens = answer["choices"][0]["token_ids"], tokens_of(http, fork)
        assert tokens[-8:] == found
        alone = post(http, "/v1/completions", prompt=tokens[:-8], **GREEDY)["choices"][0]["token_ids"]
        assert found == alone
    for one in [name, *forks]:
        http.delete(f"/v1/branches/{one}")
    assert server.wait_idle()["num_used_blocks"] == 0


def test_scores_are_those_of_an_echoed_prompt(http: httpx.Client) -> None:
    name = opened(http)
    found = post(http, f"/v1/branches/{name}/score", continuations=[" the sea", [5, 6, 7]])
    for score in found["data"]:
        prompt = tokens_of(http, name) + score["token_ids"]
        echoed = post(http, "/v1/completions", prompt=prompt, echo=True, logprobs=0, max_tokens=0)
        expected = echoed["choices"][0]["logprobs"]["token_logprobs"][-len(score["token_ids"]) :]
        assert score["logprobs"] == pytest.approx(expected, abs=1e-5)  # the sums of numpy depend on the batch
    assert found["usage"]["prompt_tokens"] == sum(len(score["token_ids"]) for score in found["data"])
    http.delete(f"/v1/branches/{name}")


def test_streams_grammars_and_stop_texts(http: httpx.Client) -> None:
    name = opened(http)
    whole = post(http, f"/v1/branches/{name}/generate", **GREEDY, advance=False)["choices"][0]
    with http.stream("POST", f"/v1/branches/{name}/generate", json={**GREEDY, "stream": True, "advance": False}) as got:
        lines = [line[6:] for line in got.iter_lines() if line.startswith("data: {")]
    assert "".join(json.loads(line)["choices"][0]["text"] for line in lines) == whole["text"]
    stop = whole["text"][3:6]
    stopped = post(http, f"/v1/branches/{name}/generate", **GREEDY, stop=stop)["choices"][0]
    assert stopped["text"] == whole["text"][: whole["text"].index(stop)]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", stop)
    assert tokens_of(http, name)[-len(stopped["token_ids"]) :] == stopped["token_ids"]
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    post(http, f"/v1/branches/{name}/append", prompt=" JSON:")
    options = {"structured_outputs": {"json": schema}, "temperature": 1, "seed": 3}
    first = post(http, f"/v1/branches/{name}/generate", max_tokens=3, **options)["choices"][0]["text"]
    rest = post(http, f"/v1/branches/{name}/generate", max_tokens=40, **options)["choices"][0]["text"]
    assert set(json.loads(first + rest)) == {"a"}
    http.delete(f"/v1/branches/{name}")


def test_messages_are_rendered(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    name = post(http, "/v1/branches", messages=messages)["id"]
    assert tokens_of(http, name) == http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    before = len(tokens_of(http, name))
    assert post(http, f"/v1/branches/{name}/truncate", num_tokens=-2)["num_tokens"] == before - 2
    http.delete(f"/v1/branches/{name}")


def test_branches_belong_to_a_key(server: RunningServer, http: httpx.Client) -> None:
    name = opened(http)
    with server.http(KEYS[1]) as other:
        assert other.get(f"/v1/branches/{name}").status_code == 404
        assert other.delete(f"/v1/branches/{name}").status_code == 404
        for verb, body in (("fork", {"n": 1}), ("append", {"prompt": "x"}), ("truncate", {"num_tokens": 1}),
                           ("generate", GREEDY), ("score", {"continuations": ["x"]})):  # fmt: skip
            refused = other.post(f"/v1/branches/{name}/{verb}", json=body)
            assert refused.status_code == 404
            assert refused.json()["error"]["code"] == "branch_not_found"
    http.delete(f"/v1/branches/{name}")


def test_wrong_requests_are_refused(http: httpx.Client) -> None:
    assert "pass one of them" in post(http, "/v1/branches", 400)["error"]["message"]
    name = opened(http)
    for verb, body, reason in (
        ("fork", {"n": 0}, "n"), ("truncate", {"num_tokens": 0}, "cannot be truncated"),
        ("score", {"continuations": [[]]}, "continuation is empty"), ("append", {"prompt": [3] * 600}, "600 tokens"),
        ("append", {"prompt": [3] * 510}, "max_model_len"), ("generate", {"n": 2}, "fork it first"),
        ("generate", {"cache_salt": "x"}, "opened with"), ("generate", {"beam_search": {"width": 2}}, "beam"),
    ):  # fmt: skip
        assert reason in post(http, f"/v1/branches/{name}/{verb}", 400, **body)["error"]["message"]
    http.delete(f"/v1/branches/{name}")


def test_a_branch_that_is_not_used_is_closed(server: RunningServer, http: httpx.Client) -> None:
    name = opened(http, ttl=0.2)
    for _ in range(50):
        if not server.wait_idle()["num_used_blocks"]:
            break
        time.sleep(0.1)
    assert http.get(f"/v1/branches/{name}").status_code == 404
    assert server.wait_idle()["num_used_blocks"] == 0


def test_a_key_has_a_number_of_branches(server: RunningServer) -> None:
    with server.http(KEYS[1]) as http:
        name = opened(http)
        for _ in range(text_branches.MAX_BRANCHES_PER_KEY // 256 - 1):
            post(http, f"/v1/branches/{name}/fork", n=256)
        post(http, f"/v1/branches/{name}/fork", n=255)
        assert "close those" in post(http, f"/v1/branches/{name}/fork", 400, n=1)["error"]["message"]
    with server.http(KEYS[0]) as http:
        http.delete(f"/v1/branches/{opened(http)}")  # another key has room


def test_an_answer_carries_a_receipt(http: httpx.Client) -> None:
    llm = LLM(str(model_folder()), **ENGINE)
    options = {"temperature": 0.9, "max_tokens": 12, "receipt": True, "return_token_ids": True}
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    messages = [{"role": "user", "content": "Hello"}]
    answers = [
        post(http, "/v1/completions", prompt=PROMPT, stop=["e"], **options),
        post(http, "/v1/completions", prompt=PROMPT, n=2, structured_outputs={"json": schema}, **options),
        post(http, "/v1/chat/completions", messages=messages, **options),
    ]
    for answer in answers:
        found = replay(llm, answer["receipt"])
        assert found.mismatch is None
        assert found.token_ids == [choice["token_ids"] for choice in answer["choices"]]
    assert "receipt" not in post(http, "/v1/completions", prompt=PROMPT, max_tokens=1)
    assert (
        "leave out `stream`"
        in post(http, "/v1/completions", 400, prompt="a", stream=True, receipt=True)["error"]["message"]
    )


def test_a_server_keeps_the_receipts_of_all_answers(tmp_path: Path) -> None:
    """Whole, streamed and several prompts, in every protocol; an aborted answer has none."""
    folder = tmp_path / "receipts"
    llm = LLM(str(model_folder()), **ENGINE)
    options = {"temperature": 0.9, "max_tokens": 12}
    with running_server(receipts=folder) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        whole = post(http, "/v1/completions", prompt=PROMPT, return_token_ids=True, **options)
        assert "receipt" not in whole
        asked = post(http, "/v1/completions", prompt=PROMPT, receipt=True, **options)
        two = post(http, "/v1/completions", prompt=[PROMPT, "The fox"], stop="e", **options)
        body = {"messages": [{"role": "user", "content": "Hello"}], "stream": True, **options}
        events = sse_events(http.post("/v1/chat/completions", json=body).text)
        post(http, "/api/generate", model="tiny", prompt=PROMPT, stream=False)
        with http.stream("POST", "/v1/completions", json={"prompt": PROMPT, "max_tokens": 400, "stream": True,
                                                          "ignore_eos": True}) as cut:  # fmt: skip
            next(cut.iter_lines())
    names = {path.stem for path in folder.iterdir()}
    assert {whole["id"], asked["id"], f"{two['id']}-0", f"{two['id']}-1", events[0]["id"]} <= names
    assert len(names) == 6
    for path in folder.iterdir():
        assert replay(llm, read_receipt(path)).mismatch is None
    kept = read_receipt(folder / f"{whole['id']}.json")
    assert kept["answer"][0]["token_ids"] == whole["choices"][0]["token_ids"]
    assert read_receipt(folder / f"{asked['id']}.json") == asked["receipt"]
