"""Anthropic's `/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from bifolio.serve.http.auth import Receive, Scope, Send
from bifolio.serve.http.context import ServerContext
from bifolio.serve.http.errors import ApiError, bad_request
from bifolio.serve.http.events import Event
from bifolio.serve.http.exchange import SSE_HEADERS, Framing, decode, read_body, send_json
from bifolio.serve.http.generation import Job, Run
from bifolio.serve.http.running import run_call, tenant_of
from bifolio.serve.http.tools import plan_tools
from bifolio.serve.http.turn import Turn, chat_tokens, prepare
from bifolio.serve.http.whole_answers import Whole
from bifolio.serve.protocols import openai_types as p
from bifolio.serve.protocols.anthropic_types import (
    AnthropicMessage,
    Block,
    Conversation,
    CountTokensRequest,
    MessagesRequest,
    ResultBlock,
    ResultPart,
)
from bifolio.serve.protocols.common import RouteRow, given, named_event, parts_of
from bifolio.serve.protocols.openai_answers import Usage
from bifolio.text.reasoning import reasoning_format
from bifolio.text.strict_json import write_json
from bifolio.text.tools import tool_format
from bifolio.text.tools.events import AnswerReader, Arguments, Call, Content, Part, Reasoning, merged

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens"}
EVENTS = Framing(SSE_HEADERS, b"", lambda error: named_event("error", json.loads(error.body("/v1/messages"))))
DELTAS = {"text": "text_delta", "thinking": "thinking_delta", "tool_use": "input_json_delta"}
FIELDS = {"text": "text", "thinking": "thinking", "tool_use": "partial_json"}


# -- requests -------------------------------------------------------------------------------------------------------
def chat_request(request: Conversation, context: ServerContext) -> p.ChatRequest:
    """The same request in the internal form."""
    messages = [message for given_one in request.messages for message in _messages(given_one)]
    if request.system is not None:
        messages.insert(0, p.Message(role="system", content=_joined(request.system)))
    options: dict[str, Any] = {}
    if isinstance(request, MessagesRequest):
        options = given(
            max_tokens=request.max_tokens,
            stop=request.stop_sequences,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
        ) | {"stream": request.stream}
    tools = [
        p.Tool(
            function=p.FunctionDefinition(
                name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
            )
        )
        for tool in request.tools or []
    ]
    return p.ChatRequest(
        messages=messages,
        model=request.model,
        tools=tools or None,
        **_tool_choice(request),
        **_reasoning(request, context),
        **_format(request),
        **options,
    )


def _tool_choice(request: Conversation) -> dict[str, Any]:
    choice = request.tool_choice
    if choice is None:
        return {}
    if not request.tools and choice.type in ("any", "tool"):
        raise bad_request("tool_choice needs tools: pass them, or leave it out", "tool_choice")
    options: dict[str, Any] = {"parallel_tool_calls": not choice.disable_parallel_tool_use}
    if choice.type == "tool":
        if choice.name is None:
            raise bad_request("tool_choice of the type tool needs a name", "tool_choice")
        return options | {"tool_choice": p.NamedTool(function=p.NamedFunction(name=choice.name))}
    return options | {"tool_choice": "required" if choice.type == "any" else choice.type}


def _reasoning(request: Conversation, context: ServerContext) -> dict[str, Any]:
    """Effort and budget; a model that does not reason takes neither."""
    template = context.model.chat_template
    if reasoning_format(template) is None and not tool_format(template).has_channels:
        return {}
    thinking, effort = request.thinking, None if request.output_config is None else request.output_config.effort
    if thinking is not None and thinking.type == "disabled":
        return {"reasoning_effort": "none"}
    budget = None if thinking is None or thinking.type != "enabled" else thinking.budget_tokens
    if thinking is not None and thinking.type == "enabled" and effort is None:
        effort = "medium"
    return given(reasoning_effort=effort, thinking_budget=budget)


def _format(request: Conversation) -> dict[str, Any]:
    if request.output_config is None or request.output_config.format is None:
        return {}
    schema = p.JsonSchemaFormat(schema=request.output_config.format.schema)
    return {"response_format": p.ResponseFormat(type="json_schema", json_schema=schema)}


def _messages(message: AnthropicMessage) -> list[p.Message]:
    """Results of tools are messages of their own, without their images, which come first in the user's message.

    Calls and reasoning belong to the message of the assistant.
    """
    if isinstance(message.content, str):
        return [p.Message(role=message.role, content=message.content)]
    found = [
        p.Message(role="tool", tool_call_id=block.tool_use_id, content=_result(block))
        for block in message.content
        if block.type == "tool_result"
    ]
    _check_sources(message.content)
    text: str | list[p.ContentPart] = "".join(block.text or "" for block in message.content if block.type == "text")
    shown = [part for block in message.content if block.type == "tool_result" for part in _shown(block)]
    if shown or any(block.type == "image" for block in message.content):
        text = [*shown, *(_part(block) for block in message.content if block.type in ("text", "image"))]
    calls = [_call(block) for block in message.content if block.type == "tool_use"]
    reasoning = "".join(block.thinking or "" for block in message.content if block.type == "thinking")
    if text or calls or reasoning or not found:
        found.append(
            p.Message(role=message.role, content=text, tool_calls=calls or None, reasoning_content=reasoning or None)
        )
    return found


def _check_sources(blocks: Sequence[Block] | Sequence[ResultPart]) -> None:
    """Refuse a source of a block that is no image."""
    for block in blocks:
        if block.source is not None and block.type != "image":
            named = ", ".join(
                name for name in block.source.__struct_fields__ if getattr(block.source, name) is not None
            )
            raise bad_request(f"a block with a source ({named}) is an image: set its type to image", "messages")


def _shown(block: Block) -> list[p.ContentPart]:
    """The images of a tool's result."""
    parts = [] if block.content is None or isinstance(block.content, str) else block.content
    _check_sources(parts)
    return [_part(part) for part in parts if part.type == "image"]


def _part(block: Block | ResultPart) -> p.ContentPart:
    """A text or an image."""
    if block.type == "text":
        return p.ContentPart(type="text", text=block.text or "")
    source = block.source
    if source is None or (source.data if source.type == "base64" else source.url) is None:
        raise bad_request("an image block needs a source with its data", "messages")
    url = source.url or f"data:{source.media_type or 'image/png'};base64,{source.data}"
    return p.ContentPart(type="image_url", image_url=url)


def _result(block: Block) -> str:
    """The result of a tool. Chat templates do not mark failures, so the text does."""
    text = _joined(block.content or "")
    return f"Error: {text}" if block.is_error and not text.lower().startswith("error") else text


def _call(block: Block) -> p.ToolCall:
    if block.id is None or block.name is None:
        raise bad_request("a tool_use block needs an id and a name", "messages")
    arguments = write_json(block.input or {})
    return p.ToolCall(id=block.id, function=p.FunctionCall(name=block.name, arguments=arguments))


def _joined(content: str | Sequence[ResultBlock] | Sequence[ResultPart]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(block.text or "" for block in content if block.type == "text")


# -- answers ----------------------------------------------------------------------------------------------------------
@dataclass(slots=True)
class MessageCall:
    """One request, and the shapes of its answer."""

    turn: Turn
    id: str = field(default_factory=lambda: f"msg_{secrets.token_hex(12)}")
    _index: int = -1  # of the block in flight
    _kind: str = ""  # of it
    _num_calls: int = 0

    @property
    def job(self) -> Job:
        return self.turn.job

    def whole(self, whole: Whole, usage: Usage) -> dict[str, Any]:
        answer = whole.answers[0]
        blocks = _blocks(parts_of(self.turn, answer.text))
        calls = any(block["type"] == "tool_use" for block in blocks)
        return self._message(blocks, usage) | _ending(answer.finish_reason, answer.stop_reason, calls)

    def _message(self, blocks: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.turn.job.model,
            "content": blocks,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(usage),
        }

    async def events(self, run: Run) -> AsyncIterator[list[Event]]:
        reader = self.turn.reader()
        has_started = False
        while batch := await run.next():
            events: list[Event] = []
            if not has_started:
                has_started = True
                message = self._message([], run.usage())
                events.append(named_event("message_start", {"type": "message_start", "message": message}))
            for piece in (piece for news in batch for piece in news.pieces):
                parts = _read(reader, piece.text, piece.finish_reason is not None)
                events += [event for part in parts for event in self._part(part)]
                if piece.finish_reason is not None:
                    ending = _ending(piece.finish_reason, piece.stop_reason, self._num_calls > 0)
                    events += [*self._close(), *_end_events(ending, run.usage())]
            yield events

    def _part(self, part: Part) -> list[bytes]:
        if isinstance(part, Call):
            self._num_calls += 1
            return self._open("tool_use", _tool_use(part.name))
        kind = "text" if isinstance(part, Content) else "thinking" if isinstance(part, Reasoning) else "tool_use"
        events: list[bytes] = []
        if kind != self._kind:
            empty = {"type": "text", "text": ""} if kind == "text" else _thinking("")
            events = self._open(kind, empty)
        delta = {"type": DELTAS[kind], FIELDS[kind]: part.text}
        payload = {"type": "content_block_delta", "index": self._index, "delta": delta}
        return [*events, named_event("content_block_delta", payload)]

    def _open(self, kind: str, block: dict[str, Any]) -> list[bytes]:
        events = self._close()
        self._index += 1
        self._kind = kind
        payload = {"type": "content_block_start", "index": self._index, "content_block": block}
        return [*events, named_event("content_block_start", payload)]

    def _close(self) -> list[bytes]:
        if not self._kind:
            return []
        self._kind = ""
        return [named_event("content_block_stop", {"type": "content_block_stop", "index": self._index})]


def _read(reader: AnswerReader, text: str, is_last: bool) -> Sequence[Part]:
    return merged([*reader.push(text), *(reader.finish() if is_last else [])])


def _blocks(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """The blocks of a whole answer."""
    blocks: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, Call):
            blocks.append(_tool_use(part.name))
        elif isinstance(part, Arguments):
            try:
                blocks[-1]["input"] = json.loads(part.text)
            except (ValueError, RecursionError):  # a call that was cut by max_tokens
                blocks[-1]["input"] = {}
        elif isinstance(part, Reasoning):
            blocks.append(_thinking(part.text))
        else:
            blocks.append({"type": "text", "text": part.text})
    return blocks


def _tool_use(name: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"toolu_{secrets.token_hex(12)}", "name": name, "input": {}}


def _thinking(text: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": text, "signature": ""}


def _ending(reason: str | None, stop: int | str | None, calls: bool) -> dict[str, Any]:
    if isinstance(stop, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop}
    known = "tool_use" if calls and reason == "stop" else STOP_REASONS.get(reason or "", "end_turn")
    return {"stop_reason": known, "stop_sequence": None}


def _end_events(ending: dict[str, Any], usage: Usage) -> list[bytes]:
    delta = {"type": "message_delta", "delta": ending, "usage": _usage(usage)}
    return [named_event("message_delta", delta), named_event("message_stop", {"type": "message_stop"})]


def _usage(usage: Usage) -> dict[str, Any]:
    cached = usage.prompt_tokens_details.cached_tokens
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
    }


# -- handlers ---------------------------------------------------------------------------------------------------------
async def messages(context: ServerContext, scope: Scope, receive: Receive, send: Send) -> None:
    request = decode(await read_body(scope, receive, context.limits), MessagesRequest)
    if request.max_tokens < 1:
        raise ApiError(400, "max_tokens must be 1 or more", param="max_tokens")
    turn = await prepare(context, chat_request(request, context), tenant_of(scope))
    await run_call(context, MessageCall(turn), scope, receive, send, EVENTS)


async def count_tokens(context: ServerContext, scope: Scope, receive: Receive, send: Send) -> None:
    request = decode(await read_body(scope, receive, context.limits), CountTokensRequest)
    context.check_model(request.model)
    chat = chat_request(request, context)
    tokens = await chat_tokens(context, chat, plan_tools(chat, context.model), tenant_of(scope))
    await send_json(send, {"input_tokens": len(tokens)})


ROUTES: tuple[RouteRow, ...] = (
    ("/v1/messages", "POST", messages),
    ("/v1/messages/count_tokens", "POST", count_tokens),
)
