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
from bifolio.api.messages import SnapshotSettings

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
    for name in ("tiny", "a1"):
        assert post(server, "/v1/branches", {"prompt": "x", "model": name})["model"] == name
    vectors = [post(server, "/v1/embeddings", {"input": "x", "model": name}, 200)["data"] for name in ("tiny", "a1")]
    assert vectors[0] != vectors[1]


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


# -- changes while the server runs -------------------------------------------------------------------------------------
KEY = "an-admin-key-of-the-tests"


@pytest.fixture(scope="module")
def changing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("adapters")
    (folder / "found").symlink_to(adapter(3))
    engine = {"kernels": None, "lora_dir": str(folder), "max_loras": 2}
    with running_server(engine=engine, admin_keys=[KEY]) as running:
        yield running


def change(server: RunningServer, verb: str, status: int = 200, key: str = KEY, **body: Any) -> Any:
    with server.http() as http:
        answer = http.post(f"/v1/{verb}_lora_adapter", json=body, headers={"authorization": f"Bearer {key}"})
    assert answer.status_code == status, answer.text
    return answer.json()


def test_adapters_come_and_go_while_others_stream(changing: RunningServer) -> None:
    plain = text(changing, None)
    with ThreadPoolExecutor(4) as pool:
        others = [pool.submit(text, changing, None, max_tokens=60) for _ in range(4)]
        change(changing, "load", lora_name="new", lora_path=str(adapter(1)))
        first = text(changing, "new")
        change(changing, "load", lora_name="new", lora_path=str(adapter(1)))  # the same: no error
        again = change(changing, "load", 400, lora_name="new", lora_path=str(adapter(2)))
        assert "load_inplace" in again["error"]["message"]
        change(changing, "load", lora_name="new", lora_path=str(adapter(2)), load_inplace=True)
        second = text(changing, "new")
        assert len({other.result() for other in others}) == 1
    assert len({plain, first, second}) == 3
    with changing.http() as http:
        rows = http.get("/lora-adapters").json()
    assert [(row["name"], row["path"], row["scale"]) for row in rows] == [("new", str(adapter(2)), 0.0)]
    change(changing, "unload", lora_name="new")
    refused = change(changing, "unload", 400, lora_name="new")
    assert "no adapter is called 'new'" in refused["error"]["message"]


def test_an_unknown_name_is_looked_up_in_the_folder(changing: RunningServer) -> None:
    assert text(changing, "found") != text(changing, None)
    refused = post(changing, "/v1/completions", {**ASK, "model": "../found"}, 400)["error"]
    assert "no adapter is called '../found'" in refused["message"]


def test_adapters_by_number_and_scale(changing: RunningServer) -> None:
    for seed in (1, 2):
        change(changing, "load", lora_name=f"n{seed}", lora_path=str(adapter(seed)))
    with changing.http() as http:
        ids = {row["name"]: row["id"] for row in http.get("/lora-adapters").json()}

    def content(*lora: tuple[str, float]) -> str:
        body = {"prompt": "Once upon", "n_predict": 10, "temperature": 0,
                "lora": [{"id": ids[name], "scale": scale} for name, scale in lora]}  # fmt: skip
        found: str = post(changing, "/completion", body)["content"]
        return found

    assert content() == content(("n1", 0.0)) == text(changing, None)
    assert content(("n1", 1.0)) == text(changing, "n1")
    both = content(("n1", 1.0), ("n2", 0.5))
    assert both == content(("n1", 1.0), ("n2", 0.5))
    assert both not in (content(("n1", 1.0)), content(("n2", 0.5)))
    refused = post(changing, "/completion", {"prompt": "x", "lora": [{"id": 99, "scale": 1}]}, 400)["error"]
    assert "no adapter has the id 99" in refused["message"]


def test_scales_for_all_requests_that_name_no_adapter(changing: RunningServer, server: RunningServer) -> None:
    for seed in (1, 2):
        change(changing, "load", lora_name=f"n{seed}", lora_path=str(adapter(seed)), load_inplace=True)
    plain, admin = text(changing, None), {"authorization": f"Bearer {KEY}"}
    with changing.http() as http:
        ids = {row["name"]: row["id"] for row in http.get("/lora-adapters").json()}
        first = http.post("/lora-adapters", json=[{"id": ids["n1"], "scale": 1.0}], headers=admin).json()
        assert {row["name"]: row["scale"] for row in first if row["scale"]} == {"n1": 1.0}
        assert text(changing, None) == text(changing, "tiny") == text(changing, "n1") != plain
        assert text(changing, "n2") != text(changing, "n1")  # a request that names an adapter has that one
        own = http.post("/completion", json={"prompt": "Once upon", "n_predict": 10, "temperature": 0, "lora": []})
        assert own.json()["content"] == plain
        http.post("/lora-adapters", json=[{"id": ids["n2"], "scale": 0.5}], headers=admin)
        assert text(changing, None) not in (plain, text(changing, "n1"))
        change(changing, "unload", lora_name="n2")
        assert text(changing, None) == plain
        unknown = http.post("/lora-adapters", json=[{"id": 99}], headers=admin)
        assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "lora")
        assert http.post("/lora-adapters", json=[]).status_code == 401
        assert http.post("/lora-adapters", json=[], headers=admin).status_code == 200
    with server.http() as http:
        assert http.post("/lora-adapters", json=[]).status_code == 403
        assert http.get("/lora-adapters").status_code == 200


def test_receipts_and_branches_keep_their_adapters(changing: RunningServer) -> None:
    """A receipt names the adapter, and a branch goes on with those that it was opened with: scales change neither."""
    change(changing, "load", lora_name="n1", lora_path=str(adapter(1)), load_inplace=True)
    asked = {**ASK, "receipt": True}
    named = post(changing, "/v1/completions", {**asked, "model": "n1"})["receipt"]["request"]["adapter"]
    plain, admin = text(changing, None), {"authorization": f"Bearer {KEY}"}
    branch = post(changing, "/v1/branches", {"prompt": "Once upon"})["id"]
    with changing.http() as http:
        number = next(row["id"] for row in http.get("/lora-adapters").json() if row["name"] == "n1")
        http.post("/lora-adapters", json=[{"id": number}], headers=admin)
        assert text(changing, None) != plain
        scaled_by_one = post(changing, "/v1/completions", asked)["receipt"]["request"]
        assert scaled_by_one["adapter"] == named
        answer = post(changing, f"/v1/branches/{branch}/generate", {"max_tokens": 10, "temperature": 0})
        assert answer["choices"][0]["text"] == plain
        scaled = post(changing, "/v1/branches", {"prompt": "Once upon"})
        assert scaled["model"] == "n1"
        answer = post(changing, f"/v1/branches/{scaled['id']}/generate", {"max_tokens": 10, "temperature": 0})
        assert (answer["model"], answer["choices"][0]["text"]) == ("n1", text(changing, "n1"))
        http.post("/lora-adapters", json=[], headers=admin)
        http.delete(f"/v1/branches/{branch}")
    assert "adapter" not in post(changing, "/v1/completions", asked)["receipt"]["request"]


def test_changes_need_the_admin_key(changing: RunningServer, server: RunningServer) -> None:
    body = {"lora_name": "new", "lora_path": str(adapter(1))}
    assert change(changing, "load", 401, key="another-key-of-some-length", **body)["error"]["code"] == "invalid_api_key"
    assert change(server, "load", 403, **body)["error"]["code"] == "admin_key_needed"
    named = change(changing, "load", 400, lora_name="tiny", lora_path=str(adapter(1)))
    assert "is the name of the model" in named["error"]["message"]
    missing = change(changing, "load", 400, lora_name="new", lora_path="/nowhere")
    assert "is no adapter" in missing["error"]["message"]


def test_conversations_with_an_adapter_survive(tmp_path: Path) -> None:
    """Branches, snapshots and pinned sessions go on with their adapter, over the blocks that it computed."""
    prompt = "Once upon a time a little fox lived in a quiet wood and sang."
    engine = {"lora_modules": {f"a{seed}": str(adapter(seed)) for seed in (1, 2)}, "block_size": 4, "num_blocks": 200}
    place = SnapshotSettings(str(tmp_path), 1 << 30)
    ask = {"max_tokens": 6, "temperature": 0}
    with running_server(engine=engine, snapshots=place) as server:
        branch = post(server, "/v1/branches", {"prompt": prompt, "model": "a1"})
        fork = post(server, f"/v1/branches/{branch['id']}/fork", {})["data"][0]
        assert branch["model"] == fork["model"] == "a1"
        alone = post(server, "/v1/completions", {**ask, "prompt": prompt, "model": "a1"})["choices"][0]["text"]
        for one in (branch, fork):
            answer = post(server, f"/v1/branches/{one['id']}/generate", {**ask, "model": "a1", "receipt": True})
            assert (answer["model"], answer["choices"][0]["text"]) == ("a1", alone)
            assert len(answer["receipt"]["request"]["adapter"]) == 32
        for other in ("a2", "tiny"):
            wrong = post(server, f"/v1/branches/{fork['id']}/generate", {**ask, "model": other}, 400)
            assert wrong["error"]["param"] == "model"
        assert post(server, "/v1/branches", {"prompt": prompt, "model": "a3"}, 404)["error"]["param"] == "model"
        post(server, "/v1/snapshots", {"branch": branch["id"], "id": "fox"})
        expected = post(server, f"/v1/branches/{branch['id']}/generate", ask)["choices"][0]["text"]
        post(server, "/v1/completions", {**ask, "prompt": prompt, "model": "a1", "session_id": "talk", "pin": True})
        talk = {"model": "a2", "temperature": 0, "max_output_tokens": 6}
        stored = post(server, "/v1/responses", {**talk, "input": prompt})["id"]
        follow = {**talk, "input": "And then?", "previous_response_id": stored}
        second = post(server, "/v1/responses", follow)["output"]
    with running_server(engine=engine, snapshots=place) as server:
        longer = {**ask, "prompt": prompt + alone, "model": "a1", "session_id": "talk"}
        again = post(server, "/v1/completions", longer)
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32  # those of the prompt
        for other in (None, "a2"):
            wrong = post(server, "/v1/snapshots/fox/restore", {"model": other}, 400)["error"]["message"]
            assert "saved with an adapter" in wrong
        again = post(server, "/v1/responses", follow)
        assert again["output"][0]["content"] == second[0]["content"]
        assert again["usage"]["input_tokens_details"]["cached_tokens"] >= 32
        restored = post(server, "/v1/snapshots/fox/restore", {"model": "a1"})
        answer = post(server, f"/v1/branches/{restored['id']}/generate", ask)
        assert (restored["model"], answer["choices"][0]["text"]) == ("a1", expected)
        usage = answer["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > usage["prompt_tokens"] - 8
