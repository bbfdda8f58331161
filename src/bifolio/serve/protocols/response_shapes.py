"""The shapes of `/v1/responses`: the response object, its output items, and the events of a stream."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from bifolio.serve.protocols.common import named_event
from bifolio.serve.protocols.openai_answers import Usage
from bifolio.serve.protocols.responses_types import ResponsesRequest
from bifolio.text.tools.events import Arguments, Call, Part, Reasoning


def response_object(
    request: ResponsesRequest, response_id: str, created: int, model: str, max_tokens: int | None
) -> dict[str, Any]:
    """A response without output."""
    form = None if request.text is None else request.text.format
    effort = None if request.reasoning is None else request.reasoning.effort
    return {
        "id": response_id,
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": max_tokens,
        "model": model,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "reasoning": {"effort": effort, "summary": None},
        "store": request.store,
        "temperature": request.temperature,
        "text": {"format": {"type": "text"} if form is None else _plain(form)},
        "tool_choice": _plain(request.tool_choice) if request.tool_choice is not None else "auto",
        "tools": [_plain(tool) for tool in request.tools or []],
        "top_p": request.top_p,
        "truncation": request.truncation or "disabled",
        "usage": None,
        "metadata": request.metadata or {},
    }


def _plain(value: Any) -> Any:
    return msgspec.to_builtins(value)


def ended(
    response: dict[str, Any], output: list[dict[str, Any]], reason: str | None, usage: Usage, num_reasoning: int
) -> dict[str, Any]:
    """The response with its output; `num_reasoning` of its tokens are reasoning."""
    is_cut = reason == "length"
    return {
        **response,
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": output,
        "usage": {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.prompt_tokens_details.cached_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": num_reasoning},
            "total_tokens": usage.total_tokens,
        },
    }


def _new_item(part: Part) -> dict[str, Any]:
    if isinstance(part, Call):
        return {
            "type": "function_call",
            "id": f"fc_{secrets.token_hex(12)}",
            "call_id": f"call_{secrets.token_hex(12)}",
            "name": part.name,
            "arguments": "",
            "status": "in_progress",
        }
    if isinstance(part, Reasoning):
        return {"type": "reasoning", "id": f"rs_{secrets.token_hex(12)}", "summary": [], "content": [],
                "status": "in_progress"}  # fmt: skip
    return {"type": "message", "id": f"msg_{secrets.token_hex(12)}", "role": "assistant", "content": [],
            "status": "in_progress"}  # fmt: skip


def _text_part(kind: str, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


@dataclass(slots=True)
class OutputWriter:
    """Collects the output items of a response from its parts, and writes the events of a stream."""

    items: list[dict[str, Any]] = field(default_factory=list)
    _text: list[str] = field(default_factory=list)  # of the item in flight
    _is_open: bool = False
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def event(self, kind: str, **payload: Any) -> bytes:
        return named_event(kind, {"type": kind, "sequence_number": next(self._numbers), **payload})

    def add(self, parts: Sequence[Part]) -> list[bytes]:
        """Take parts; the events that describe them."""
        return [event for part in parts for event in self._add(part)]

    def close(self, status: str = "completed") -> list[bytes]:
        """End the item in flight."""
        if not self._is_open:
            return []
        self._is_open = False
        item, text = self.items[-1], "".join(self._text)
        place: dict[str, Any] = {"item_id": item["id"], "output_index": len(self.items) - 1}
        item["status"] = status
        if item["type"] == "function_call":
            item["arguments"] = text
            done = self.event("response.function_call_arguments.done", **place, name=item["name"], arguments=text)
            events = [done]
        else:
            part = _text_part(item["type"], text)
            item["content"] = [part]
            kind = "reasoning_text" if item["type"] == "reasoning" else "output_text"
            place |= {"content_index": 0}
            extra: dict[str, Any] = {} if kind == "reasoning_text" else {"logprobs": []}
            events = [
                self.event(f"response.{kind}.done", **place, text=text, **extra),
                self.event("response.content_part.done", **place, part=part),
            ]
        return [*events, self.event("response.output_item.done", output_index=place["output_index"], item=item)]

    def _add(self, part: Part) -> list[bytes]:
        events: list[bytes] = []
        kind = "reasoning" if isinstance(part, Reasoning) else "message"
        if isinstance(part, Call):
            return [*self.close(), *self._open(part)]
        if not isinstance(part, Arguments) and not (self._is_open and self.items[-1]["type"] == kind):
            events = [*self.close(), *self._open(part)]
        self._text.append(part.text)
        item = self.items[-1]
        place: dict[str, Any] = {"item_id": item["id"], "output_index": len(self.items) - 1}
        if isinstance(part, Arguments):
            return [*events, self.event("response.function_call_arguments.delta", **place, delta=part.text)]
        name = "reasoning_text" if kind == "reasoning" else "output_text"
        extra: dict[str, Any] = {} if kind == "reasoning" else {"logprobs": []}
        return [*events, self.event(f"response.{name}.delta", **place, content_index=0, delta=part.text, **extra)]

    def _open(self, part: Part) -> list[bytes]:
        item = _new_item(part)
        self.items.append(item)
        self._text, self._is_open = [], True
        index = len(self.items) - 1
        events = [self.event("response.output_item.added", output_index=index, item=dict(item))]
        if item["type"] != "function_call":
            empty = _text_part(item["type"], "")
            place: dict[str, Any] = {"item_id": item["id"], "output_index": index, "content_index": 0}
            events.append(self.event("response.content_part.added", **place, part=empty))
        return events
