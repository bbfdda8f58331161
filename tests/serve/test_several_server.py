"""`bifolio serve` as a process: several models under a budget, and a server that is killed and started again."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import TEMPLATE

from bifolio import LLM, SamplingParams
from bifolio.cli.main import build_app
from bifolio.serve.several.settings import PROCESS_BYTES
from cli_runner import CliRunner
from helpers import tiny_folder

pytestmark = pytest.mark.full
PROMPT = "the fox and the dog and the cat went to the house of the old man by the sea " * 3
SIZES = ("--memory", "8MB", "--max-model-len", "512", "--block-size", "8")
KEY = "a-key-of-the-tests"


class Served:
    """A server's process, its address and its client."""

    def __init__(self, *arguments: str) -> None:
        code = "from bifolio.cli.main import main; main()"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, "serve", "--port", "0", *SIZES, *arguments], stderr=subprocess.PIPE, text=True
        )
        self.lines: list[str] = []
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                break
        else:
            raise AssertionError("".join(self.lines))
        self.url = found[0]
        threading.Thread(target=self._read, daemon=True).start()
        headers = {"authorization": f"Bearer {KEY}"}
        self.client = httpx.Client(base_url=self.url, headers=headers, timeout=60)

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines.extend(self.process.stderr)

    def complete(self, model: str | None = None, prompt: str = PROMPT) -> dict[str, Any]:
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 6, **({} if model is None else {"model": model})}
        answer = self.client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def end(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)
        self.process.wait(30)
        self.client.close()


@contextlib.contextmanager
def served(*arguments: str) -> Iterator[Served]:
    server = Served(*arguments)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.end()


def folders(count: int) -> list[Path]:
    return [
        tiny_folder(tokenizer=True, chat_template=TEMPLATE, max_position_embeddings=1024, seed=seed)
        for seed in range(count)
    ]


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_three_models_under_a_budget_for_two(tmp_path: Path) -> None:
    models = folders(3)
    weights = sum(path.stat().st_size for path in models[0].glob("*.safetensors"))
    budget = 2 * (weights + 8_000_000 + PROCESS_BYTES) + 1000
    expected = {}
    for folder in models:
        with LLM(folder, max_model_len=512, block_size=8, memory="8MB") as llm:
            params = SamplingParams(temperature=0.0, max_tokens=6)
            expected[folder.name] = llm.generate(PROMPT, params)[0].outputs[0].text
    assert len(set(expected.values())) == 3
    arguments = [argument for folder in models for argument in ("-m", str(folder))]
    with served(*arguments, "--models-memory", str(budget), "--kv-offload-dir", str(tmp_path / "kv")) as server:
        names, client = list(expected), server.client
        for turn, name in enumerate([*names, names[0]]):
            answer = server.complete(name)
            assert answer["choices"][0]["text"] == expected[name]
            assert answer["model"] == name
            used = client.get("/api/ps").json()
            assert used["memory"]["used"] <= budget
            assert len(used["models"]) <= 2
            assert (cached(answer) > 0) == (turn == 3)  # the model was evicted: its blocks come from the files
        assert states_of(client) == {names[0]: "loaded", names[1]: "unloaded", names[2]: "loaded"}
        shown = CliRunner().invoke(build_app(), ["ps", "--url", server.url]).output
        assert names[0] in shown
        assert names[1] not in shown
        assert "in use" in shown
        assert server.complete()["model"] == names[0]  # without a name: the first one
        assert client.post("/models/unload", json={"model": names[0]}).json() == {"success": True}
        assert client.post("/models/unload", json={"model": names[0]}).status_code == 400
        assert client.post("/models/load", json={"model": names[2]}).json() == {"success": True}
        body = {"model": names[2] + ":latest", "prompt": "the", "stream": False, "keep_alive": 0}
        assert client.post("/api/generate", json=body).status_code == 200
        wait_for(lambda: states_of(client)[names[2]] == "unloaded")
        assert client.post("/v1/completions", json={"model": "nobody", "prompt": "a"}).status_code == 404
        assert (
            client.post("/v1/completions", content=b"{", headers={"content-type": "application/json"}).status_code
            == 400
        )
        assert client.post("/tokenize", json={"model": names[2], "prompt": "the fox"}).status_code == 200
        with client.stream("POST", "/v1/completions", json={"model": names[2], "prompt": "the", "stream": True}) as one:
            assert list(one.iter_lines())[-2] == "data: [DONE]"
        metrics = client.get("/metrics").text
        assert f'bifolio:num_requests_running{{model="{names[2]}"}} 0.0' in metrics
        assert "bifolio:models_evictions" in metrics
        assert client.get("/ready").json() == {"status": "ready"}
        assert "<html" in client.get("/").text
        assert client.get("/no/such/path").status_code == 404


def states_of(client: httpx.Client) -> dict[str, str]:
    return {card["id"]: card["status"]["value"] for card in client.get("/v1/models").json()["data"]}


def wait_for(condition: Any, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_killed_server_finds_its_prompts_again(tmp_path: Path) -> None:
    """`kill -9` of the server and of its engine; with API keys, whose salts must be those of the first start."""
    folder = folders(1)[0]
    arguments = ("-m", str(folder), "--kv-offload-dir", str(tmp_path), "--api-key", KEY, "--api-key", "another-key-8")
    with served(*arguments) as server:
        first = server.complete()
        assert cached(first) == 0
        wait_for(lambda: len(list(tmp_path.rglob("*.block"))) >= first["usage"]["prompt_tokens"] // 8)
        server.end(signal.SIGKILL)
    with served(*arguments) as server:
        again = server.complete()
        assert again["choices"] == first["choices"]
        assert cached(again) >= first["usage"]["prompt_tokens"] // 8 * 8 - 8
        server.client.headers["authorization"] = "Bearer another-key-8"
        assert cached(server.complete()) == 0  # blocks of one key are not read for another
        count = r"bifolio:external_prefix_cache_hits_total [1-9]"
        wait_for(lambda: re.search(count, server.client.get("/metrics").text))
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
    assert not [path for path in tmp_path.rglob("*") if path.suffix == ".part"]


def test_keys_guard_all_models(tmp_path: Path) -> None:
    models = folders(2)
    arguments = ("-m", str(models[0]), "-m", str(models[1]), "--api-key", KEY)
    with served(*arguments) as server:
        assert server.complete(models[1].name)["model"] == models[1].name
        for path in ("/v1/models", "/api/ps", "/metrics"):
            assert httpx.get(server.url + path).status_code == 401
        answer = httpx.post(server.url + "/v1/completions", json={"prompt": "a", "model": models[0].name})
        assert answer.status_code == 401
        assert json.loads(answer.text)["error"]["code"] == "invalid_api_key"
        assert states_of(server.client)[models[0].name] == "unloaded"  # no request without a key starts an engine


def test_a_kept_model_that_cannot_start_is_an_error_of_one_line() -> None:
    model, other = folders(2)
    arguments = ("-m", str(model), "-m", str(other), "--keep", model.name)
    with pytest.raises(AssertionError, match=rf"error: the model '{model.name}' cannot be started") as caught:
        Served(*arguments, "--max-model-len", "100000")
    assert "Traceback" not in str(caught.value)


def test_presets_give_models_options_of_their_own(tmp_path: Path) -> None:
    models = folders(2)
    file = tmp_path / "models.ini"
    file.write_text(
        f"[short]\nmodel = {models[0]}\nmax-model-len = 64\n[long]\nmodel = {models[1]}\nload-on-startup = true\n"
    )
    with served("--models-preset", str(file)) as server:
        assert states_of(server.client) == {"short": "unloaded", "long": "loaded"}
        assert server.complete("long")["model"] == "long"
        body = {"prompt": PROMPT, "max_tokens": 6, "model": "short"}
        answer = server.client.post("/v1/completions", json=body)
        assert answer.status_code == 400
        assert "64" in answer.json()["error"]["message"]
        assert server.complete("short", "a fox")["model"] == "short"


def test_an_evicted_model_sleeps_in_its_process(tmp_path: Path) -> None:
    """Room for one that is awake beside one that sleeps: each is started once, and finds its prompts in the files."""
    models = folders(2)
    weights = sum(path.stat().st_size for path in models[0].glob("*.safetensors"))
    budget = 2 * (weights + PROCESS_BYTES) + 8_000_000 + 1000
    arguments = ["-m", str(models[0]), "-m", str(models[1]), "--models-memory", str(budget), "--models-sleep", "1GB"]
    names = [folder.name for folder in models]
    with served(*arguments, "--kv-offload-dir", str(tmp_path / "kv")) as server:
        texts: dict[str, set[str]] = {}
        for turn in range(6):
            name, other = names[turn % 2], names[1 - turn % 2]
            answer = server.complete(name)
            texts.setdefault(name, set()).add(answer["choices"][0]["text"])
            assert (cached(answer) > 0) == (turn > 1)
            states = states_of(server.client)
            assert states == {name: "loaded", other: "sleeping" if turn else "unloaded"}
            assert server.client.get("/api/ps").json()["memory"]["used"] <= budget
        assert all(len(found) == 1 for found in texts.values())
        assert server.client.post("/models/unload", json={"model": names[0]}).json() == {"success": True}
        assert states_of(server.client) == {names[0]: "unloaded", names[1]: "loaded"}
        assert sum("model loaded" in line for line in server.lines) == 2
        assert server.complete(names[0])["choices"][0]["text"] in texts[names[0]]
