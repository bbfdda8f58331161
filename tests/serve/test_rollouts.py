"""Trainers' calls: rollouts by token ids, pauses and weights from a folder, as prime-rl and TRL send them."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import RunningServer, running_server

from bifolio import LLM, SamplingParams
from helpers import fresh_folder, tiny_folder

pytestmark = pytest.mark.full  # the module starts servers
PROMPT = [5, 9, 11, 40, 41, 42, 3, 8, 20]
PARAMS = {"temperature": 0.8, "seed": 4, "max_tokens": 10, "ignore_eos": True, "logprobs": 0}


def make_folder(seed: int) -> Path:
    return tiny_folder(fresh_folder("rollouts"), tokenizer=True, seed=seed, max_position_embeddings=1024)


@pytest.fixture(scope="module")
def weights() -> tuple[Path, Path]:
    return make_folder(0), make_folder(1)


@pytest.fixture(scope="module")
def server(weights: tuple[Path, Path]) -> Iterator[RunningServer]:
    with running_server(engine={"model": str(weights[0])}, allow_updates=True) as running:
        yield running


def rollout(http: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = http.post("/inference/v1/generate", json={"token_ids": PROMPT, "sampling_params": PARAMS, **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def expected_of(folder: Path) -> tuple[list[int], list[float]]:
    llm = LLM(str(folder), kernels="reference", max_model_len=64, num_blocks=32)
    [output] = llm.generate({"prompt_token_ids": PROMPT}, SamplingParams(**PARAMS))  # type: ignore[arg-type]
    scored = output.outputs[0].logprobs
    assert scored is not None
    return output.outputs[0].token_ids, [entry.logprob for entry in scored]


def test_the_calls_of_a_trainer_in_order(server: RunningServer, weights: tuple[Path, Path]) -> None:
    """Rollout, pause, new weights, resume, rollout: as prime-rl does with a folder for each step."""
    with server.http() as http:
        before = rollout(http)
        tokens, logprobs = expected_of(weights[0])
        assert before["choices"][0]["token_ids"] == tokens
        content = before["choices"][0]["logprobs"]["content"]
        assert [entry["token"] for entry in content] == [f"token_id:{token}" for token in tokens]
        assert [entry["logprob"] for entry in content] == pytest.approx(logprobs, abs=1e-5)
        version = before["weight_version"]
        assert http.post("/pause", params={"mode": "keep", "clear_cache": "false"}).json()["weight_version"] == version
        updated = http.post("/update_weights", json={"weight_dir": str(weights[1])})
        assert updated.json() == {"weight_version": version + 1, "status": "ok"}
        assert http.post("/resume").status_code == 200
        after = rollout(http, cache_salt=str(version + 1))
        assert after["choices"][0]["token_ids"] == expected_of(weights[1])[0] != tokens
        assert (after["weight_version"], after["num_weight_changes"]) == (version + 1, 0)
        assert http.post("/update_weights", json={"weight_dir": str(weights[0])}).status_code == 200
        assert rollout(http)["choices"][0]["token_ids"] == tokens


def test_a_paused_request_waits_and_an_aborted_one_ends(server: RunningServer) -> None:
    with server.http() as http:
        http.post("/pause", params={"mode": "keep"})
        found: list[dict[str, Any]] = []
        thread = threading.Thread(target=lambda: found.append(rollout(http)))
        thread.start()
        time.sleep(0.5)
        assert not found
        http.post("/resume")
        thread.join(20)
        assert len(found[0]["choices"][0]["token_ids"]) == 10
        long = {"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True}
        answers: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: answers.append(http.post("/v1/completions", json=long)))
        thread.start()
        time.sleep(0.3)
        http.post("/pause", params={"mode": "abort"})
        thread.join(20)
        assert answers[0].json()["choices"][0]["finish_reason"] == "abort"
        http.post("/resume")
        assert len(rollout(http)["choices"][0]["token_ids"]) == 10


def test_the_calls_of_trl(server: RunningServer, weights: tuple[Path, Path]) -> None:
    with server.http() as http:
        assert http.get("/health/").status_code == 200
        assert http.get("/get_world_size/").json() == {"world_size": 1}
        body = {"prompts": [PROMPT, PROMPT], "n": 2, "repetition_penalty": 1.0, "temperature": 0.8, "top_p": 1.0,
                "top_k": -1, "min_p": 0.0, "max_tokens": 10, "logprobs": 0, "structured_outputs_regex": None,
                "images": None, "generation_kwargs": {"seed": 4, "ignore_eos": True}}  # fmt: skip
        found = http.post("/generate/", json=body).json()
        assert found["prompt_ids"] == [PROMPT, PROMPT]
        assert len(found["completion_ids"]) == 4
        tokens, logprobs = expected_of(weights[0])
        assert found["completion_ids"][0] == tokens
        assert [one[0] for one in found["logprobs"][0]] == pytest.approx(logprobs, abs=1e-5)
        assert found["logprob_token_ids"][0] == [[token] for token in tokens]
        assert http.post("/reset_prefix_cache/").status_code == 200
        tensor = {"name": "lm_head.weight", "dtype": "torch.float32", "shape": [3, 3]}
        refused = http.post("/update_named_param/", json=tensor)
        assert refused.status_code == 400
        assert "/init_communicator/" in refused.json()["error"]["message"]


def test_weights_arrive_over_a_communicator(server: RunningServer, weights: tuple[Path, Path]) -> None:
    """As TRL's client sends them: the trainer is the last rank of a group of gloo."""
    import torch.distributed as dist

    from bifolio import LanguageModel

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    body = {"host": "127.0.0.1", "port": port, "world_size": 2, "client_device_uuid": "none"}
    library: Any = dist
    with server.http() as http:
        version = rollout(http)["weight_version"]
        assert http.post("/init_communicator/", json={**body, "world_size": 3}).status_code == 400
        assert http.post("/init_communicator/", json=body).status_code == 200
        store = library.PrefixStore("client2server", library.TCPStore("127.0.0.1", port, 2, is_master=False))
        group, options = library.ProcessGroupGloo(store, 1, 2), library.BroadcastOptions()
        options.rootRank, options.rootTensor = 1, 0
        refused = http.post("/update_named_param/", json={"name": "x", "dtype": "torch.int8", "shape": [1]})
        assert refused.status_code == 400
        for name, parameter in LanguageModel.from_pretrained(weights[1]).named_parameters():
            tensor = {"name": name, "dtype": str(parameter.dtype), "shape": list(parameter.shape)}
            assert http.post("/update_named_param/", json=tensor).status_code == 200
            group.broadcast([parameter.data], options).wait()
            group.barrier().wait()
        assert rollout(http)["weight_version"] == version
        assert http.post("/reset_prefix_cache/").json()["weight_version"] == version + 1
        assert rollout(http)["choices"][0]["token_ids"] == expected_of(weights[1])[0]
        assert http.post("/close_communicator/").status_code == 200
        assert http.post("/update_weights", json={"weight_dir": str(weights[0])}).status_code == 200


def test_logprobs_of_a_prompt(server: RunningServer, weights: tuple[Path, Path]) -> None:
    """As prime-rl asks for them: one entry for each prompt token, the first without a logprob."""
    llm = LLM(str(weights[0]), kernels="reference", max_model_len=64, num_blocks=32)
    params = SamplingParams(max_tokens=1, prompt_logprobs=1, temperature=1.0, seed=1)
    [output] = llm.generate({"prompt_token_ids": PROMPT}, params)
    with server.http() as http:
        asked = {"max_tokens": 1, "temperature": 1.0, "top_p": 1.0, "prompt_logprobs": 1}
        found = rollout(http, sampling_params=asked, request_id="mine")
    assert found["request_id"] == "mine"
    first, *others = found["prompt_logprobs"]
    assert first is None
    for token, entry, expected in zip(PROMPT[1:], others, (output.prompt_logprobs or [])[1:], strict=True):
        assert expected is not None
        assert next(iter(entry)) == str(token)
        assert entry[str(token)]["logprob"] == pytest.approx(expected.logprob, abs=1e-5)
        assert entry[str(token)]["rank"] == expected.rank
        assert set(entry) == {str(one) for one in expected}


def test_wrong_weights_are_refused(server: RunningServer) -> None:
    with server.http() as http:
        before = rollout(http)
        for folder in (
            "/nowhere/at/all",
            str(tiny_folder(fresh_folder("rollouts"), tokenizer=True, num_hidden_layers=3)),
        ):
            assert http.post("/update_weights", json={"weight_dir": folder}).status_code == 400
        assert http.post("/pause", params={"mode": "sleep"}).status_code == 400
        assert rollout(http)["choices"][0]["token_ids"] == before["choices"][0]["token_ids"]


def test_updates_are_refused_unless_they_are_allowed() -> None:
    with running_server() as server, server.http() as http:
        for path in ("/pause", "/resume", "/reset_prefix_cache"):
            refused = http.post(path)
            assert refused.status_code == 403
            assert "--allow-updates" in refused.json()["error"]["message"]
        assert http.post("/update_weights", json={"weight_dir": "/x"}).status_code == 403


def test_a_sleeping_server_keeps_requests_waiting(server: RunningServer) -> None:
    with server.http() as http:
        before = rollout(http)
        assert http.get("/is_sleeping").json() == {"is_sleeping": False}
        assert http.post("/sleep", params={"level": 2}).status_code == 200
        assert http.get("/is_sleeping").json() == {"is_sleeping": True}
        assert http.get("/health").status_code == 200
        refused = http.post("/resume")
        assert refused.status_code == 400
        assert "/wake_up" in refused.json()["error"]["message"]
        found: list[dict[str, Any]] = []
        thread = threading.Thread(target=lambda: found.append(rollout(http)))
        thread.start()
        http.post("/wake_up", params={"tags": "weights"})
        assert http.get("/is_sleeping").json() == {"is_sleeping": True}
        time.sleep(0.3)
        assert not found
        http.post("/wake_up", params={"tags": "kv_cache"})
        thread.join(20)
        assert found[0]["choices"][0]["token_ids"] == before["choices"][0]["token_ids"]
        for path in ("/sleep?level=3", "/sleep?mode=soon", "/wake_up?tags=heads"):
            assert http.post(path).status_code == 400, path
        assert http.get("/is_sleeping").json() == {"is_sleeping": False}


def test_a_request_in_flight_continues_after_sleep(server: RunningServer) -> None:
    body = {"prompt": PROMPT, "max_tokens": 300, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
    with server.http() as http:
        expected = http.post("/v1/completions", json=body).json()["choices"][0]["token_ids"]
        answers: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: answers.append(http.post("/v1/completions", json=body)))
        thread.start()
        time.sleep(0.05)
        assert http.post("/sleep").status_code == 200
        time.sleep(0.2)
        assert http.post("/wake_up").status_code == 200
        thread.join(30)
        assert answers[0].json()["choices"][0]["token_ids"] == expected
