"""Hints about conversations: `session_id`, `ttl` and `pin`, their list and release, and pins that outlive a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import running_server

from bifolio.api.messages import SnapshotSettings

pytestmark = pytest.mark.full  # servers are started
PROMPT = "Once upon a time a little fox lived in a quiet wood, and a river ran by it all the year."
GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
SMALL = {"num_blocks": 96, "max_model_len": 256}


def complete(http: httpx.Client, prompt: str = PROMPT, **body: Any) -> dict[str, Any]:
    answer = http.post("/v1/completions", json={"prompt": prompt, **GREEDY, **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def states(http: httpx.Client) -> dict[str, Any]:
    return {one["id"]: one for one in http.get("/v1/sessions").json()["data"]}


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_protected_conversations_stay_while_others_are_evicted() -> None:
    with running_server(engine=SMALL) as server, server.http() as http:
        complete(http, "A first text, without any hint, of about the same length as the other one here.")
        complete(http, session_id="fox", ttl=600)
        complete(http, "A third text, of a session whose time is over at once, as long.", session_id="old", ttl=0.001)
        assert states(http)["fox"]["state"] == "warm"
        for number in range(12):
            complete(http, f"{number} other texts fill the cache, one after the other, until all was used. " * 2)
        found = states(http)
        assert (found["fox"]["state"], found["old"]["state"]) == ("warm", "gone")
        assert 0 < found["fox"]["ttl"] < 600
        assert cached(complete(http)) > 40
        assert http.delete("/v1/sessions/fox").json()["deleted"]
        assert http.delete("/v1/sessions/fox").status_code == 404
        for number in range(12):
            complete(http, f"{number} further texts fill the cache, one after the other, until all was used. " * 2)
        assert cached(complete(http)) == 0


def test_the_page_and_the_list_show_where_conversations_are(tmp_path: Path) -> None:
    engine = {**SMALL, "kv_offload_dir": str(tmp_path)}
    keys = ["first-secret-key", "second-secret-key"]
    with (
        running_server(engine=engine, keys=keys) as server,
        server.http(keys[0]) as http,
        server.http(keys[1]) as other,
    ):
        complete(http, session_id="fox", ttl=0.001)
        for number in range(12):
            complete(other, f"{number} other texts fill the cache, one after the other, until all was used. " * 2)
        assert states(http)["fox"]["state"] == "disk"
        assert states(other) == {}
        with http.stream("GET", "/live") as live:
            line = next(line for line in live.iter_lines() if line.startswith("data: "))
        assert [one["session_id"] for one in json.loads(line[6:])["sessions"]] == ["fox"]
        assert cached(complete(http, session_id="fox")) > 40
        assert states(http)["fox"]["state"] == "warm"


def test_hints_without_a_session_are_refused() -> None:
    with running_server(engine=SMALL) as server, server.http() as http:
        for body in ({"ttl": 5}, {"pin": True}):
            answer = http.post("/v1/completions", json={"prompt": PROMPT, **GREEDY, **body})
            assert answer.status_code == 400
            assert "pass its session_id" in answer.json()["error"]["message"]
        answer = http.post("/v1/completions", json={"prompt": ["a b", "c d"], **GREEDY, "session_id": "x"})
        assert answer.status_code == 400


def test_stored_responses_take_hints_too() -> None:
    with running_server(engine=SMALL) as server, server.http() as http:
        body = {"input": PROMPT, "max_output_tokens": 8, "temperature": 0, "session_id": "talk", "pin": True}
        assert http.post("/v1/responses", json=body).status_code == 200
        found = states(http)["talk"]
        assert (found["pin"], found["ttl"], found["state"]) == (True, None, "warm")


def test_a_pinned_conversation_outlives_the_server(tmp_path: Path) -> None:
    place = SnapshotSettings(str(tmp_path), 1 << 30)
    with running_server(engine=SMALL, snapshots=place) as server, server.http() as http:
        first = complete(http, session_id="a name / of any kind", pin=True)
        complete(http, "Another text, which is not pinned and of the same length.", session_id="b")
    assert len(list(tmp_path.rglob("*.session"))) == 1
    longer = PROMPT + first["choices"][0]["text"] + " And then?"
    with running_server(engine=SMALL, snapshots=place) as server, server.http() as http:
        listed = states(http)["a name / of any kind"]
        assert (listed["state"], listed["pin"], listed["num_cached_tokens"]) == ("disk", True, 0)
        assert listed["num_tokens"] >= 60
        again = complete(http, longer, session_id="a name / of any kind", pin=True)
        assert cached(again) > 40
        assert {name: one["state"] for name, one in states(http).items()} == {"a name / of any kind": "warm"}
        assert list(tmp_path.rglob("*.session"))  # for the case that this server is killed
        with running_server(engine=SMALL) as plain, plain.http() as other:
            assert complete(other, longer)["choices"][0]["text"] == again["choices"][0]["text"]
        complete(http, longer, session_id="a name / of any kind")  # pinned no more
    assert not list(tmp_path.rglob("*.session"))


def test_pins_over_tiers_are_listed_after_a_restart_by_their_key_alone(tmp_path: Path) -> None:
    engine, keys = {**SMALL, "kv_offload_dir": str(tmp_path / "tier")}, ["first-secret-key", "second-secret-key"]
    place = SnapshotSettings(str(tmp_path / "snapshots"), 1 << 30)
    with running_server(engine=engine, snapshots=place, keys=keys) as server, server.http(keys[0]) as http:
        complete(http, session_id="fox", pin=True)
    with (
        running_server(engine=engine, snapshots=place, keys=keys) as server,
        server.http(keys[0]) as http,
        server.http(keys[1]) as other,
    ):
        assert {name: one["state"] for name, one in states(http).items()} == {"fox": "disk"}
        assert states(other) == {}
        assert other.delete("/v1/sessions/fox").status_code == 404
        assert cached(complete(http, session_id="fox", pin=True)) > 40
        assert http.delete("/v1/sessions/fox").json()["deleted"]
        assert states(http) == {}
