"""Clients that misbehave in every way: the server stays up, others finish with the right text, nothing leaks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from serving import Limits, RunningServer, post, running_server, sse_events

pytestmark = pytest.mark.full
BODY: dict[str, Any] = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 24, "ignore_eos": True}


@pytest.fixture(scope="module")
def tiny() -> Iterator[RunningServer]:
    """A pool so small that requests wait and are preempted all the time."""
    engine = {"num_blocks": 40, "block_size": 4, "max_model_len": 128, "max_num_seqs": 12, "chunk_size": 16}
    with running_server(engine=engine, limits=Limits(max_queue=2000, body_timeout=2.0)) as server:
        yield server


def expected_text(server: RunningServer, body: dict[str, Any] = BODY) -> str:
    with server.http() as http:
        return str(http.post("/v1/completions", json=body).json()["choices"][0]["text"])


def check_well(server: RunningServer, text: str) -> None:
    """Alive, right, and empty."""
    assert server.alive
    assert server.wait_idle()["num_used_blocks"] == 0
    assert expected_text(server) == text
    assert server.wait_idle()["num_used_blocks"] == 0


def raw(server: RunningServer, *parts: bytes, read: bool = True, reset: bool = False) -> bytes:
    """Send bytes as they are; answer with what comes back until the end or a pause."""
    answer = b""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        try:
            for part in parts:
                connection.sendall(part)
            if reset:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return b""
            if not read:
                return b""
            connection.settimeout(5)
            while chunk := connection.recv(65536):
                answer += chunk
        except (TimeoutError, ConnectionError):
            pass
        return answer


def post_bytes(body: bytes, *, length: int | None = None, path: str = "/v1/completions") -> bytes:
    size = len(body) if length is None else length
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {size}\r\n\r\n".encode() + body


def test_thirty_two_clients_at_once_get_the_text_each_would_have_alone(server: RunningServer) -> None:
    prompts = ["Once upon a time", "The fox", "Grüße", "decode writes one token", "x"]
    bodies = [
        {**BODY, "prompt": prompts[number % 5] + " " * (number % 3), "max_tokens": 12 + number // 2}
        for number in range(32)
    ]
    alone = [expected_text(server, body) for body in bodies]

    async def one(number: int) -> str:
        body = bodies[number]
        if number % 2:
            return (await post(server, "/v1/completions", body)).text
        events = sse_events((await post(server, "/v1/completions", {**body, "stream": True})).body.decode())
        assert events[-1] == "[DONE]"
        return "".join(event["choices"][0]["text"] for event in events[:-1])

    async def together() -> list[str]:
        return await asyncio.gather(*(one(number) for number in range(32)))

    found = asyncio.run(together())
    assert [text.encode() for text in found] == [text.encode() for text in alone]


def test_disconnects_at_every_point(tiny: RunningServer) -> None:
    text = expected_text(tiny)
    body = json.dumps({**BODY, "max_tokens": 100, "stream": True}).encode()
    whole = post_bytes(body)
    for cut in sorted({0, 1, 10, 40, len(whole) // 2, len(whole) - 1, len(whole)}):
        for reset in (False, True):
            raw(tiny, whole[:cut], read=False, reset=reset)
    for size in (1, 100, 400, 2000):  # while the answer streams
        with socket.create_connection(("127.0.0.1", tiny.port), timeout=10) as connection:
            connection.sendall(whole)
            connection.recv(size)
    raw(tiny, post_bytes(json.dumps({**BODY, "max_tokens": 100}).encode()), read=False)
    check_well(tiny, text)


def test_cancelling_a_stream_cancels_the_request_within_a_step_or_two(server: RunningServer) -> None:
    steps = server.wait_idle()["num_steps"]
    body = {**BODY, "prompt": "The fox", "max_tokens": 480, "stream": True}
    with server.http() as http, http.stream("POST", "/v1/completions", json=body) as answer:
        next(answer.iter_raw())
    stats = server.wait_idle()
    assert stats["num_steps"] - steps < 300
    assert stats["num_used_blocks"] == 0


def test_garbage_bytes(tiny: RunningServer) -> None:
    text = expected_text(tiny)
    rng = random.Random(5)
    for _ in range(60):
        raw(tiny, rng.randbytes(rng.randint(1, 3000)), read=False)
    for odd in (
        b"\r\n\r\n",
        b"GET",
        b"GET / HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),  # TLS to a plain port
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999999999999\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",  # noqa: E501
        b"GET /live HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
    ):
        raw(tiny, odd, read=False)
    check_well(tiny, text)


def test_large_bodies_are_refused(tiny: RunningServer) -> None:
    text = expected_text(tiny)
    assert b" 413 " in raw(tiny, post_bytes(b"", length=10 << 20))[:20]  # announced
    huge = json.dumps({"prompt": "x" * (10 << 20)}).encode()
    raw(tiny, post_bytes(huge), read=False)
    chunked = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    piece = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    raw(tiny, chunked, *[piece] * 160, read=False)  # not announced
    check_well(tiny, text)


def test_a_hundred_thousand_headers(tiny: RunningServer) -> None:
    text = expected_text(tiny)
    many = b"GET /health HTTP/1.1\r\n" + b"".join(b"x-%d: y\r\n" % number for number in range(100_000)) + b"\r\n"
    answer = raw(tiny, many)
    assert not answer or b" 431 " in answer[:20]
    long = b"GET /health HTTP/1.1\r\nx: " + b"y" * (4 << 20) + b"\r\n\r\n"
    answer = raw(tiny, long)
    assert not answer or b" 431 " in answer[:20]
    assert b" 200 " in raw(tiny, b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")[:20]
    check_well(tiny, text)


def test_bodies_that_never_come(tiny: RunningServer) -> None:
    text = expected_text(tiny)
    waiting = [socket.create_connection(("127.0.0.1", tiny.port)) for _ in range(40)]
    for connection in waiting:
        connection.sendall(post_bytes(b'{"prompt"', length=1000))
    assert expected_text(tiny) == text
    time.sleep(2.2)  # the time limit of the fixture
    for connection in waiting:
        connection.settimeout(10)
        assert b" 408 " in connection.recv(100)[:20]
        connection.close()
    check_well(tiny, text)


WRONG: list[Any] = [
    None, True, -1, 0, 10**30, -(10**30), 1.5, 1e308, "", "text", "\x00", "\ud83d", [], [None], [[[]]], {}, {"a": 1},
    ["x"] * 1000, [10**20], "9" * 400, {"\u0000": None},
]  # fmt: skip


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize"])
def test_wrong_types_in_every_field(tiny: RunningServer, path: str) -> None:
    document = tiny.http().get("/openapi.json").json()
    reference = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    fields = document["components"]["schemas"][reference.rpartition("/")[2]]["properties"]
    good: dict[str, Any] = {
        "/v1/completions": {"prompt": "x", "max_tokens": 1},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
        "/v1/embeddings": {"input": "x"},
        "/tokenize": {"prompt": "x"},
    }[path]

    async def all_of_them() -> None:
        gate = asyncio.Semaphore(16)

        async def one(name: str, value: Any) -> None:
            async with gate:
                answer = await post(tiny, path, {**good, name: value})
                assert answer.status in (200, 400, 404), (name, value, answer)

        await asyncio.gather(*(one(name, value) for name in fields for value in WRONG))

    asyncio.run(all_of_them())
    assert tiny.wait_idle()["num_used_blocks"] == 0


def test_numbers_that_json_does_not_have(tiny: RunningServer) -> None:
    with tiny.http() as http:
        for number in ("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1e-999", "0x10", "1_000", "01", "9" * 5000):
            content = b'{"prompt": "x", "max_tokens": 2, "temperature": ' + number.encode() + b"}"
            answer = http.post("/v1/completions", content=content)
            assert answer.status_code in (200, 400), (number, answer.text)


def test_a_thousand_requests_on_a_tiny_pool(tiny: RunningServer) -> None:
    """All finish with their right text, some streamed, some cancelled half-way; nothing is left afterwards."""
    prompts = ["Once upon a time", "The fox", "a", "quiet wood and the sea", "read books"]
    bodies = [{**BODY, "prompt": prompt, "max_tokens": 3 + 2 * n} for n, prompt in enumerate(prompts)]
    texts = [expected_text(tiny, body) for body in bodies]
    rng = random.Random(3)

    async def one(number: int) -> bool:
        kind = number % 5
        if rng.random() < 0.1:  # gives up half-way
            with contextlib.suppress(TimeoutError):
                await post(tiny, "/v1/completions", {**bodies[kind], "max_tokens": 100}, timeout=0.5)
            return False
        answer = await post(tiny, "/v1/completions", bodies[kind])
        assert answer.status == 200, answer
        assert answer.text == texts[kind]
        return True

    async def storm() -> int:
        long = [post(tiny, "/v1/completions", {**bodies[0], "max_tokens": 60}) for _ in range(12)]  # 4 times the pool
        return sum(await asyncio.gather(*(one(number) for number in range(1000)))) + len(await asyncio.gather(*long))

    assert asyncio.run(storm()) > 812
    assert tiny.wait_idle(60)["num_used_blocks"] == 0
    assert tiny.context.engine.counter("num_preemptions") > 0
    assert not tiny.context._open_per_share


def test_killing_the_engine_in_the_middle_of_everything(tiny: RunningServer) -> None:
    text = expected_text(tiny)

    async def storm() -> list[int]:
        jobs = [asyncio.create_task(post(tiny, "/v1/completions", {**BODY, "n": 2})) for _ in range(60)]
        await asyncio.sleep(0.1)
        hello = tiny.context.engine.hello
        assert hello is not None
        os.kill(hello.pid, signal.SIGKILL)
        answers = await asyncio.gather(*jobs)
        for answer in answers:
            if answer.status == 200:
                assert answer.text == text
        return [answer.status for answer in answers]

    assert set(asyncio.run(storm())) <= {200, 503}
    with tiny.http() as http:
        while http.get("/ready").status_code != 200:
            time.sleep(0.05)
    check_well(tiny, text)


def test_a_client_that_does_not_read_holds_little(tiny: RunningServer) -> None:
    """Streams that nobody reads go on in the kernel's buffers and ours, then end; others are not held up."""
    text = expected_text(tiny)
    body = json.dumps({**BODY, "max_tokens": 110, "stream": True, "logprobs": 100}).encode()
    stuck = []
    for _ in range(10):
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", tiny.port))
        connection.sendall(post_bytes(body))
        stuck.append(connection)
    assert expected_text(tiny) == text
    for connection in stuck:
        connection.close()
    check_well(tiny, text)


def test_memory_is_back_afterwards(tiny: RunningServer) -> None:
    """After warming up, another round of load leaves the processes as large as they were."""
    text = expected_text(tiny)

    def round_of_load() -> None:
        async def storm() -> None:
            await asyncio.gather(*(post(tiny, "/v1/completions", BODY) for _ in range(80)))

        asyncio.run(storm())
        tiny.wait_idle()

    hello = tiny.context.engine.hello
    assert hello is not None
    process = psutil.Process(hello.pid)
    round_of_load()
    before = process.memory_info().rss
    round_of_load()
    assert process.memory_info().rss < before * 1.1 + (4 << 20)
    check_well(tiny, text)
