"""Snapshots of clients and llama.cpp's slot files, against real servers that end and start again."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import RunningServer, running_server

from bifolio.api.messages import SnapshotSettings
from bifolio.engine.tiers.snapshots import Snapshot
from bifolio.errors import RequestError
from bifolio.serve.process.snapshot_files import SnapshotFiles, UnknownSnapshotError

pytestmark = pytest.mark.full  # servers are started
KEYS = ["first-secret-key", "second-secret-key"]
SECRET = b"s" * 32
PROMPT = "Once upon a time a little fox lived in a quiet wood, and a river ran by."
GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}


def settings(folder: Path, max_bytes: int = 1 << 30) -> SnapshotSettings:
    return SnapshotSettings(str(folder), max_bytes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("snapshots")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    with running_server(keys=KEYS, snapshots=settings(folder)) as running:
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


def test_a_branch_is_saved_listed_restored_and_removed(http: httpx.Client, folder: Path) -> None:
    whole = post(http, "/v1/completions", prompt=PROMPT, **{**GREEDY, "max_tokens": 16})["choices"][0]["token_ids"]
    name = post(http, "/v1/branches", prompt=PROMPT)["id"]
    first = post(http, f"/v1/branches/{name}/generate", **GREEDY)["choices"][0]["token_ids"]
    card = post(http, "/v1/snapshots", branch=name, id="fox.1")
    assert card["id"] == "fox.1"
    assert card["kind"] == "snapshot"
    assert card["bytes"] > 1000
    assert http.get("/v1/snapshots/fox.1").json() == card
    assert card in http.get("/v1/snapshots").json()["data"]
    for path in folder.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)
    http.delete(f"/v1/branches/{name}")
    restored = post(http, "/v1/snapshots/fox.1/restore")
    assert restored["num_tokens"] == card["num_tokens"]
    rest = post(http, f"/v1/branches/{restored['id']}/generate", **GREEDY)["choices"][0]["token_ids"]
    assert first + rest == whole
    assert http.delete("/v1/snapshots/fox.1").json() == {"id": "fox.1", "deleted": True, "object": "snapshot"}
    assert http.get("/v1/snapshots/fox.1").status_code == 404
    assert not list(folder.rglob("fox.1.snapshot"))


def test_snapshots_of_one_key_are_hidden_from_others(server: RunningServer, http: httpx.Client) -> None:
    post(http, "/v1/snapshots", prompt=PROMPT, id="mine")
    with server.http(KEYS[1]) as other:
        assert other.get("/v1/snapshots").json()["data"] == []
        assert other.get("/v1/snapshots/mine").status_code == 404
        assert other.delete("/v1/snapshots/mine").status_code == 404
        assert other.post("/v1/snapshots/mine/restore").json()["error"]["code"] == "snapshot_not_found"
    assert http.get("/v1/snapshots/mine").status_code == 200
    http.delete("/v1/snapshots/mine")


@pytest.mark.parametrize("name", ["..", "../x", "a/b", ".hidden", "a" * 129, "a\0b", "ä"])
def test_names_are_checked(http: httpx.Client, name: str) -> None:
    assert (
        "the name of a snapshot has at most 128"
        in post(http, "/v1/snapshots", 400, prompt=PROMPT, id=name)["error"]["message"]
    )


def test_bad_requests_are_refused(http: httpx.Client) -> None:
    for body, sentence in (
        ({}, "pass one of them"),
        ({"prompt": PROMPT, "branch": "b"}, "pass one of them"),
        ({"branch": "branch_0"}, "there is no branch"),
        ({"response": "resp_0"}, "no response is stored"),
        ({"response": "resp_0", "cache_salt": "x"}, "leave it out"),
    ):
        answer = http.post("/v1/snapshots", json=body)
        assert answer.status_code in (400, 404)
        assert sentence in answer.json()["error"]["message"]


def test_a_damaged_file_is_a_named_error(http: httpx.Client, folder: Path) -> None:
    post(http, "/v1/snapshots", prompt=PROMPT, id="damaged")
    path = next(folder.rglob("damaged.snapshot"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert "its checksum is wrong" in post(http, "/v1/snapshots/damaged/restore", 400)["error"]["message"]
    assert http.delete("/v1/snapshots/damaged").status_code == 200


def test_the_slot_files_of_llama_cpp(server: RunningServer, http: httpx.Client) -> None:
    post(http, "/completion", prompt=PROMPT, n_predict=8, temperature=0)
    server.wait_idle()
    slot = 0
    saved = post(http, f"/slots/{slot}?action=save", filename="slot.bin")
    assert saved["id_slot"] == slot
    assert saved["n_saved"] > 8
    assert saved["n_written"] > 1000
    erased = post(http, f"/slots/{slot}?action=erase")
    assert erased["n_erased"] == saved["n_saved"]
    assert "has no text of this key" in post(http, f"/slots/{slot}?action=save", 400, filename="x")["error"]["message"]
    restored = post(http, f"/slots/{slot}?action=restore", filename="slot.bin")
    assert (restored["n_restored"], restored["n_read"]) == (saved["n_saved"], saved["n_written"])
    with server.http(KEYS[1]) as other:
        assert other.post(f"/slots/{slot}?action=restore", json={"filename": "slot.bin"}).status_code == 404
        assert other.post(f"/slots/{slot}?action=save", json={"filename": "slot.bin"}).status_code == 400
    assert http.post("/slots/99?action=save", json={"filename": "x"}).status_code == 404
    assert http.post("/slots/0?action=copy", json={"filename": "x"}).status_code == 400


def test_stored_responses_survive_a_restart(tmp_path: Path) -> None:
    """The engine's process ends and another begins: follow-ups continue, their history from the cache."""
    answers: list[str] = []
    place = settings(tmp_path / "files")
    body = {
        "input": "A long question about foxes, rivers and quiet woods." * 3,
        "max_output_tokens": 8,
        "temperature": 0,
    }
    with running_server(snapshots=place) as server, server.http() as client:
        first = post(client, "/v1/responses", **body)
        follow = post(client, "/v1/responses", input="And then?", previous_response_id=first["id"], **_short())
        answers.append(follow["output"][0]["content"][0]["text"])
        dropped = post(client, "/v1/responses", **body)["id"]
        client.delete(f"/v1/responses/{dropped}")
    assert len(list(tmp_path.rglob("*.response"))) == 2
    with running_server(snapshots=place) as server, server.http() as client:
        assert client.get(f"/v1/responses/{first['id']}").json()["output"] == first["output"]
        again = post(client, "/v1/responses", input="And then?", previous_response_id=first["id"], **_short())
        answers.append(again["output"][0]["content"][0]["text"])
        assert again["usage"]["input_tokens_details"]["cached_tokens"] > 100
        assert client.get(f"/v1/responses/{dropped}").status_code == 404
        assert list(tmp_path.rglob(f"{first['id']}.response"))  # for the case that this server is killed
        assert client.delete(f"/v1/responses/{first['id']}").status_code == 200
        assert not list(tmp_path.rglob(f"{first['id']}.response"))
    assert answers[0] == answers[1]
    with running_server(snapshots=place) as server, server.http() as client:
        assert client.get(f"/v1/responses/{first['id']}").status_code == 404
        assert client.get(f"/v1/responses/{follow['id']}").status_code == 200


def test_many_stored_responses_are_saved_in_the_seconds_of_the_end(tmp_path: Path) -> None:
    """Fifty conversations continue on the next server, each from blocks that it need not compute."""
    place, found = settings(tmp_path), {}
    with running_server(snapshots=place) as server, server.http() as client:
        for number in range(50):
            body = {"input": f"{number}: foxes, rivers and quiet woods, day after day.", **_short()}
            found[number] = post(client, "/v1/responses", **body)["id"]
    assert len(list(tmp_path.rglob("*.response"))) == 50
    with running_server(snapshots=place) as server, server.http() as client:
        for number, name in found.items():
            again = post(client, "/v1/responses", input="And then?", previous_response_id=name, **_short())
            assert again["usage"]["input_tokens_details"]["cached_tokens"] >= 16, number


def _short() -> dict[str, Any]:
    return {"max_output_tokens": 8, "temperature": 0}


def test_without_a_folder_snapshots_are_refused_and_beside_tiers_they_are_kept(tmp_path: Path) -> None:
    with running_server() as server, server.http() as client:
        assert "--snapshot-dir" in post(client, "/v1/snapshots", 400, prompt=PROMPT)["error"]["message"]
    with running_server(engine={"kv_offload_dir": str(tmp_path)}) as server, server.http() as client:
        post(client, "/v1/snapshots", prompt=PROMPT, id="kept")
        assert list((tmp_path / "snapshots").rglob("kept.snapshot"))


def test_the_bytes_of_a_key_are_bounded_and_saved_responses_make_room(tmp_path: Path) -> None:
    import numpy as np

    files = SnapshotFiles(settings(tmp_path, 10_000), "sampled-0123456789abcdef")
    block = np.zeros(3000, np.uint8)
    snapshot = Snapshot([1, 2], 1, "", "", "", 4, [block], None, {})
    for name in ("a", "b"):
        files.write(files.path(b"key", name, ".response"), snapshot, b"key")
    files.write(files.path(b"key", "c"), snapshot, b"key")
    files.write(files.path(b"key", "d"), snapshot, b"key")  # the oldest response made room
    assert [info.name for info in files.all_of(b"key")] == ["b", "c", "d"]
    files.write(files.path(b"key", "e"), snapshot, b"key")
    assert [info.name for info in files.all_of(b"key")] == ["c", "d", "e"]
    with pytest.raises(RequestError, match="--snapshot-bytes"):
        files.write(files.path(b"key", "f"), snapshot, b"key")
    files.write(files.path(b"other", "f"), snapshot, b"other")
    with pytest.raises(UnknownSnapshotError):
        files.find(b"other", "c")
