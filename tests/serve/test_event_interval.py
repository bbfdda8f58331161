"""`stream_options.interval_ms`: events are written together, none is lost, none waits for the next one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from serving import RunningServer

from bifolio.serve.http.errors import ApiError
from bifolio.serve.http.exchange import grouped


class Event(msgspec.Struct):
    number: int


def pieces_of(steps: list[Any], interval: float) -> tuple[list[list[int]], str | None]:
    """Numbers of the events in each piece, and the error; a step is a number, a pause or an error."""

    async def events() -> AsyncIterator[list[msgspec.Struct | bytes]]:
        for step in steps:
            if isinstance(step, float):
                await asyncio.sleep(step)
            elif isinstance(step, ApiError):
                raise step
            else:
                yield [Event(step)]

    async def collect() -> tuple[list[list[int]], str | None]:
        found: list[list[int]] = []
        try:
            async for piece in grouped(events(), interval):
                lines = [line for line in piece.decode().split("\n\n") if line]
                found.append([json.loads(line.removeprefix("data: "))["number"] for line in lines])
        except ApiError as error:
            return found, str(error)
        return found, None

    return asyncio.run(collect())


def test_the_first_event_is_alone_and_the_others_are_together() -> None:
    assert pieces_of([1, 2, 3, 4], 30.0) == ([[1], [2, 3, 4]], None)


@pytest.mark.full
def test_events_do_not_wait_for_the_next_one() -> None:
    pieces, _ = pieces_of([1, 2, 3, 0.4, 4], 0.05)
    assert pieces == [[1], [2, 3], [4]]


def test_events_before_an_error_are_written() -> None:
    pieces, error = pieces_of([1, 2, ApiError(500, "it broke", "server_error")], 30.0)
    assert pieces == [[1], [2]]
    assert error is not None


@pytest.mark.full
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_the_answer_is_the_same(server: RunningServer, path: str) -> None:
    prompt: dict[str, Any] = (
        {"prompt": "Once upon"}
        if path == "/v1/completions"
        else {"messages": [{"role": "user", "content": "Once upon"}]}
    )
    body = {**prompt, "temperature": 0, "max_tokens": 24, "ignore_eos": True, "stream": True, "return_token_ids": True}
    found = []
    for interval in (0, 40):
        with server.http() as http:
            answer = http.post(path, json={**body, "stream_options": {"interval_ms": interval}})
        lines = [line for line in answer.text.split("\n\n") if line]
        assert lines.pop() == "data: [DONE]"
        choices = [choice for line in lines for choice in json.loads(line.removeprefix("data: "))["choices"]]
        found.append([token for choice in choices for token in choice.get("token_ids") or ()])
    assert found[0] == found[1]
    assert len(found[0]) == 24


def test_an_interval_out_of_range_is_refused_by_name(server: RunningServer) -> None:
    with server.http() as http:
        body = {"prompt": "a", "stream": True, "stream_options": {"interval_ms": -1}}
        reply = http.post("/v1/completions", json=body)
    assert reply.status_code == 400
    assert "interval_ms" in reply.json()["error"]["param"]
