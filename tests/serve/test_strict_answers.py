"""Answers of every protocol are JSON that strict clients read, whatever a model writes into the arguments of a call."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from serving import RunningServer, sse_events

from bifolio.serve.http.encoding import encode_json
from bifolio.serve.http.turn import Turn
from bifolio.text.tools import FORMATS
from bifolio.text.tools.events import AnswerReader, Part
from bifolio.text.tools.format import ToolFormat
from hostile_calls import ANSWERS

pytestmark = pytest.mark.full  # the module starts a server
USER: list[Any] = [{"role": "user", "content": "Hello"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "tags": {}}}
FUNCTION = {"name": "get_weather", "parameters": SCHEMA}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": USER, "max_tokens": 4, "tools": [{"type": "function", "function": FUNCTION}],
    },
    "/v1/responses": {
        "input": "Hello", "max_output_tokens": 4, "store": False, "tools": [{"type": "function", **FUNCTION}],
    },
    "/v1/messages": {
        "messages": USER, "max_tokens": 4, "tools": [{"name": "get_weather", "input_schema": SCHEMA}],
    },
    "/api/chat": {
        "messages": USER, "options": {"num_predict": 4}, "tools": [{"type": "function", "function": FUNCTION}],
    },
}  # fmt: skip


class Scripted:
    """A model with a script: the real reader reads the script in place of the sampled text, some letters at a time."""

    def __init__(self, inner: AnswerReader, script: str) -> None:
        self._inner, self._script = inner, script

    def push(self, text: str) -> list[Part]:
        now, self._script = self._script[:23], self._script[23:]
        return self._inner.push(now)

    def finish(self) -> list[Part]:
        return [*self._inner.push(self._script), *self._inner.finish()]


@pytest.fixture(params=FORMATS, ids=[kind.name for kind in FORMATS])
def wanted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments of the call in the script of a format."""
    kind: type[ToolFormat] = request.param
    script, arguments = ANSWERS[kind.name]
    monkeypatch.setattr(Turn, "reader", lambda turn: Scripted(kind().reader(turn.tools.tools), script))
    return arguments


def strict(text: str) -> Any:
    return msgspec.json.decode(text.encode())


def streamed(path: str, text: str) -> Any:
    """The arguments of the call in a stream, of which every event is strict JSON."""
    if path == "/api/chat":
        lines = [strict(line) for line in text.splitlines()]
        return next(line["message"]["tool_calls"][0] for line in lines if "tool_calls" in line["message"])["function"][
            "arguments"
        ]
    events = [strict(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]
    if path == "/v1/messages":
        deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
        return strict("".join(delta.get("partial_json", "") for delta in deltas))
    if path == "/v1/responses":
        deltas = [e["delta"] for e in events if e["type"] == "response.function_call_arguments.delta"]
        return strict("".join(deltas))
    assert sse_events(text)[-1] == "[DONE]"
    calls = [call for event in events for choice in event["choices"] for call in choice["delta"].get("tool_calls", [])]
    return strict("".join(call["function"].get("arguments", "") for call in calls))


def whole(path: str, text: str) -> Any:
    answer = strict(text)
    if path == "/v1/chat/completions":
        return strict(answer["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"])
    if path == "/v1/responses":
        return strict(next(item["arguments"] for item in answer["output"] if item["type"] == "function_call"))
    if path == "/v1/messages":
        return next(block["input"] for block in answer["content"] if block["type"] == "tool_use")
    return answer["message"]["tool_calls"][0]["function"]["arguments"]


@pytest.mark.parametrize("path", BODIES)
def test_calls_are_strict_json(server: RunningServer, wanted: dict[str, Any], path: str) -> None:
    with server.http() as http:
        for stream in (False, True):
            answer = http.post(path, json={"model": "tiny", "stream": stream, **BODIES[path]})
            assert answer.status_code == 200, answer.text
            assert (streamed if stream else whole)(path, answer.text) == wanted


def test_a_conversation_with_halves_of_surrogates_and_nan_in_calls_goes_on(server: RunningServer) -> None:
    arguments = r'{"city": "\ud800", "days": NaN}'
    call = {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    messages = [
        *USER,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "x"},
    ]
    with server.http() as http:
        body = {**BODIES["/v1/chat/completions"], "messages": messages}
        answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text


def test_texts_that_are_no_unicode_are_encoded() -> None:
    value = {"a\ud800": ["\udc00", "\ud83d\ude00", float("nan"), float("inf")]}
    assert strict(encode_json(value).decode()) == {"a\ufffd": ["\ufffd", "😀", None, None]}
