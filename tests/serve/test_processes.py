"""The engine process: its failures, its restarts, and a clean end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from faulty_worker import DIE, FAIL, HANG
from serving import Limits, RunningServer, model_folder, running_server

from bifolio.errors import ConfigError
from bifolio.model.loaded import TextModel
from bifolio.model.model_file import ModelFile
from exotic_weights import k_quant_llama

pytestmark = pytest.mark.full
HERE = Path(__file__).parent
WORKER = [sys.executable, str(HERE / "faulty_worker.py")]
GREEDY: dict[str, Any] = {
    "model": "tiny",
    "temperature": 0,
    "extra_body": {"ignore_eos": True, "logit_bias": {str(FAIL): -100, str(DIE): -100, str(HANG): -100}},
}


@pytest.fixture(scope="module")
def faulty() -> Iterator[RunningServer]:
    with running_server(worker_command=WORKER, step_timeout=2.0) as server:
        yield server


def wait_ready(server: RunningServer, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    with server.http() as http:
        while http.get("/ready").status_code != 200:
            assert time.monotonic() < end, "the engine did not come back"
            time.sleep(0.02)


def in_background(function: Any) -> tuple[threading.Thread, list[Any]]:
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(function())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, outcome


def test_a_request_that_breaks_a_step_fails_alone(faulty: RunningServer) -> None:
    client = faulty.client()
    expected = client.completions.create(prompt="Once", max_tokens=60, **GREEDY).choices[0].text
    jobs = [in_background(lambda: client.completions.create(prompt="Once", max_tokens=60, **GREEDY)) for _ in range(5)]
    time.sleep(0.05)
    with pytest.raises(openai.InternalServerError) as failure:
        client.completions.create(prompt=[5, FAIL, 6], max_tokens=10, **GREEDY)
    assert "step" in str(failure.value)
    for thread, outcome in jobs:
        thread.join()
        assert outcome[0].choices[0].text == expected
    assert faulty.wait_idle()["num_used_blocks"] == 0


@pytest.mark.parametrize("how", ["kill", "exit", "hang"])
def test_a_dead_engine_is_replaced(faulty: RunningServer, how: str) -> None:
    wait_ready(faulty)
    client = faulty.client()
    expected = client.completions.create(prompt="Once", max_tokens=30, **GREEDY).choices[0].text
    restarts = faulty.context.engine.num_restarts
    # Several samples, so that neither request ends before the engine does; a slot stays free for the next one.
    streamed, events = in_background(lambda: read_stream(client))
    whole, outcome = in_background(lambda: client.completions.create(prompt="The", max_tokens=450, n=4, **GREEDY))
    time.sleep(0.03)
    if how == "kill":
        hello = faulty.context.engine.hello
        assert hello is not None
        os.kill(hello.pid, signal.SIGKILL)
    else:
        token = DIE if how == "exit" else HANG
        with pytest.raises(openai.APIStatusError) as failure:
            client.completions.create(prompt=[5, token, 6], max_tokens=10, **GREEDY)
        assert failure.value.status_code == 503
        assert failure.value.response.headers["retry-after"]
    whole.join()
    streamed.join()
    assert isinstance(outcome[0], openai.APIStatusError), outcome
    assert outcome[0].status_code == 503
    assert isinstance(events[0], openai.APIError), events  # an error event inside the stream
    assert "engine" in str(events[0])
    wait_ready(faulty)
    assert faulty.context.engine.num_restarts == restarts + 1
    assert client.completions.create(prompt="Once", max_tokens=30, **GREEDY).choices[0].text == expected
    assert faulty.wait_idle()["num_used_blocks"] == 0


def read_stream(client: openai.OpenAI) -> str:
    chunks = client.completions.create(prompt="Once", max_tokens=450, n=3, stream=True, **GREEDY)
    return "".join(chunk.choices[0].text for chunk in chunks)


def test_while_there_is_no_engine(faulty: RunningServer) -> None:
    wait_ready(faulty)
    hello = faulty.context.engine.hello
    assert hello is not None
    os.kill(hello.pid, signal.SIGKILL)
    with faulty.http() as http:
        end = time.monotonic() + 10
        while http.get("/ready").status_code == 200 and time.monotonic() < end:
            time.sleep(0.005)
        answers = [http.post("/v1/completions", json={"prompt": "x"}), http.post("/v1/embeddings", json={"input": "x"})]
        assert http.get("/health").status_code == 200
        assert http.get("/metrics").status_code == 200
        for answer in answers:
            assert answer.status_code == 503
            assert int(answer.headers["retry-after"]) > 0
            assert answer.json()["error"]["code"] == "engine_unavailable"
    wait_ready(faulty)


def test_an_impossible_setting_is_said_at_the_start() -> None:
    with pytest.raises(ConfigError, match="max_model_len"), running_server(engine={"num_blocks": 4}):
        pass


# -- limits -------------------------------------------------------------------------------------------------------


def test_the_front_end_holds_no_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Decoding and assembling fail in this process, which is the front end; the engine has a process of its own."""

    def refuse(*_: Any) -> Any:
        raise AssertionError("the front end read a tensor")

    k_quants = k_quant_llama(tmp_path / "k.gguf")
    monkeypatch.setattr(ModelFile, "load", refuse)
    monkeypatch.setattr("bifolio.quant.tensor.decode_blocks", refuse)
    with running_server(engine={"model": str(k_quants), "max_model_len": 64}) as server:
        assert type(server.context.model) is TextModel
        answer = server.client().completions.create(prompt=[5, 6, 7], max_tokens=3, model="tiny", temperature=0)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 3


def test_a_full_queue_says_when_to_come_back() -> None:
    with running_server(limits=Limits(max_queue=2, max_open_per_key=None), engine={"max_num_seqs": 2}) as server:

        async def storm() -> list[int]:
            async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
                body = {"prompt": "Once", "max_tokens": 200, "ignore_eos": True}
                answers = await asyncio.gather(*(http.post("/v1/completions", json=body) for _ in range(12)))
            for answer in answers:
                if answer.status_code == 429:
                    assert int(answer.headers["retry-after"]) >= 1
                    assert answer.json()["error"]["type"] == "rate_limit_error"
            return [answer.status_code for answer in answers]

        statuses = asyncio.run(storm())
        assert set(statuses) == {200, 429}
        assert statuses.count(200) == 4
        assert server.wait_idle()["num_used_blocks"] == 0


def test_a_deadline_ends_the_request() -> None:
    with running_server(limits=Limits(request_timeout=0.3), engine={"max_model_len": 1024}) as server:
        with server.http() as http:
            slow = {"prompt": "Once", "max_tokens": 1000, "ignore_eos": True, "n": 8}
            answer = http.post("/v1/completions", json=slow)
            assert answer.status_code == 504
            own = http.post("/v1/completions", json={**slow, "timeout": 0.01})
            assert own.status_code == 408
            with http.stream("POST", "/v1/completions", json={**slow, "stream": True}) as streamed:
                assert streamed.status_code == 200
                text = streamed.read().decode()
            assert '"code":"timeout"' in text
            assert "[DONE]" not in text
        assert server.wait_idle()["num_used_blocks"] == 0


# -- the end ------------------------------------------------------------------------------------------------------


def start_command(tmp_path: Path, *options: str) -> tuple[subprocess.Popen[bytes], int]:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    engine = ["--max-model-len", "1024", "--max-num-seqs", "4", "--memory", "16MB", "--threads", "1"]
    log = (tmp_path / "log").open("wb")
    process = subprocess.Popen(
        [sys.executable, "-m", "bifolio.cli.main", "serve", "-m", str(model_folder()), "--port", str(port),
         *engine, *options],
        stderr=log,
    )  # fmt: skip
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/ready", timeout=5).status_code == 200:
                return process, port
        except httpx.HTTPError:
            pass
        assert process.poll() is None, (tmp_path / "log").read_text()
        time.sleep(0.05)
    raise AssertionError("the server did not start: " + (tmp_path / "log").read_text())


def worker_pids(parent: int) -> list[int]:
    import psutil

    return [child.pid for child in psutil.Process(parent).children(recursive=True)]


@pytest.mark.parametrize("drain", ["30", "0.3"])
def test_sigterm_lets_requests_finish_within_a_limit(tmp_path: Path, drain: str) -> None:
    process, port = start_command(tmp_path, "--drain-timeout", drain)
    try:
        workers = worker_pids(process.pid)
        assert workers
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=0)
        num_tokens = 300 if drain == "30" else 1000
        body: dict[str, Any] = {"prompt": "Once", "max_tokens": num_tokens, "extra_body": {"ignore_eos": True}}
        thread, outcome = in_background(lambda: client.completions.create(model=model_folder().name, n=4, **body))
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        thread.join()
        assert process.wait(30) == 0, (tmp_path / "log").read_text()
        if drain == "30":
            assert [choice.finish_reason for choice in outcome[0].choices] == ["length"] * 4
        else:
            assert isinstance(outcome[0], openai.APIStatusError | openai.APIConnectionError), outcome
        assert not [pid for pid in workers if _is_running(pid)]
    finally:
        process.kill()
    assert "Once" not in (tmp_path / "log").read_text()  # no prompt in the log


def _is_running(pid: int) -> bool:
    import psutil

    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_a_killed_front_end_leaves_no_engine_behind(tmp_path: Path) -> None:
    process, _ = start_command(tmp_path)
    workers = worker_pids(process.pid)
    process.kill()
    process.wait()
    end = time.monotonic() + 20
    while any(_is_running(pid) for pid in workers):
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_client_that_stops_reading_is_dropped() -> None:
    import json
    import socket

    with running_server(limits=Limits(write_timeout=0.4), engine={"max_model_len": 1024}) as server:
        body = {"prompt": "Once", "max_tokens": 900, "n": 4, "logprobs": 100, "stream": True, "ignore_eos": True}
        content = json.dumps(body).encode()
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        connection.settimeout(30)
        head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(content)}\r\n\r\n"
        connection.sendall(head.encode() + content)
        assert connection.recv(4096)
        assert server.wait_idle()["num_used_blocks"] == 0  # ended although nobody reads
        received = b""
        try:
            while data := connection.recv(1 << 20):
                received = (received + data)[-1000:]
        except ConnectionError:
            pass
        connection.close()
        assert b"[DONE]" not in received
        assert server.http().get("/ready").status_code == 200


@pytest.mark.slow
def test_memory_of_both_processes_is_back_after_load(tmp_path: Path) -> None:
    """Rounds of requests, streamed, whole and cut off: the third leaves both processes as large as the second."""
    import psutil

    process, port = start_command(tmp_path)
    try:
        both = [psutil.Process(process.pid), *(psutil.Process(pid) for pid in worker_pids(process.pid))]

        def sizes() -> list[int]:
            return [each.memory_info().rss for each in both]

        async def round_of_load() -> None:
            gate = asyncio.Semaphore(40)
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=120) as http:

                async def one(number: int) -> None:
                    body = {"prompt": f"Text {number}", "max_tokens": 20, "ignore_eos": True, "stream": number % 3 == 0}
                    async with gate:
                        with contextlib.suppress(httpx.TimeoutException):
                            await http.post("/v1/completions", json=body, timeout=0.05 if number % 7 == 0 else 120)

                await asyncio.gather(*(one(number) for number in range(600)))

        asyncio.run(round_of_load())
        asyncio.run(round_of_load())
        before = sizes()
        asyncio.run(round_of_load())
        for old, new in zip(before, sizes(), strict=True):
            assert new < 1.05 * old + (2 << 20), (before, sizes())
    finally:
        process.kill()
