"""OpenAI's `/v1/responses`: conversations that the server stores.

A follow-up (`previous_response_id`) continues the tokens of the stored turn and branches from its kept blocks, so the
engine computes the new tokens alone. Where the template writes the history differently than the model did, the prompt
is rendered anew and the prefix cache finds the common part.
"""

from __future__ import annotations

import secrets
import time
from array import array
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from bifolio.api.messages import Recalled
from bifolio.serve.http.auth import Receive, Scope, Send, Tenant
from bifolio.serve.http.context import ServerContext
from bifolio.serve.http.errors import ApiError, bad_request
from bifolio.serve.http.events import Event
from bifolio.serve.http.exchange import SSE_HEADERS, Framing, decode, read_body, send_json
from bifolio.serve.http.generation import Job, Run
from bifolio.serve.http.running import run_call, tenant_of
from bifolio.serve.http.turn import History, Turn, prepare
from bifolio.serve.http.whole_answers import Whole
from bifolio.serve.protocols import openai_types as p
from bifolio.serve.protocols.common import RouteRow, given, named_event, parts_of
from bifolio.serve.protocols.openai_answers import Usage
from bifolio.serve.protocols.response_shapes import OutputWriter, ended, response_object
from bifolio.serve.protocols.responses_types import (
    IGNORED,
    ContentPart,
    Item,
    ResponsesRequest,
    Stored,
    ToolName,
)
from bifolio.text.reasoning import texts_of
from bifolio.text.tools.events import Part, merged

KEPT = {"id", "status", "type"}  # of items and parts: returned by `GET`
EVENTS = Framing(
    SSE_HEADERS,
    b"",
    lambda error: named_event(
        "error", {"type": "error", "code": error.code, "message": error.message, "param": error.param,
                  "sequence_number": 0}
    ),
)  # fmt: skip


# -- requests -------------------------------------------------------------------------------------------------------
def chat_request(request: ResponsesRequest, messages: list[p.Message]) -> p.ChatRequest:
    """The same request in the internal form, with all messages of the conversation."""
    if request.instructions:
        messages = [p.Message(role="system", content=request.instructions), *messages]
    tools = [
        p.Tool(
            function=p.FunctionDefinition(
                name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict
            )
        )
        for tool in request.tools or []
    ]
    choice: Any = request.tool_choice
    if isinstance(choice, ToolName):
        choice = p.NamedTool(function=p.NamedFunction(name=choice.name))
    effort = None if request.reasoning is None else request.reasoning.effort
    return p.ChatRequest(
        messages=messages,
        model=request.model,
        stream=request.stream,
        tools=tools or None,
        **given(
            tool_choice=choice,
            parallel_tool_calls=request.parallel_tool_calls,
            max_tokens=request.max_output_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            seed=request.seed,
            session_id=request.session_id,
            ttl=request.ttl,
            pin=request.pin or None,
            thinking_budget=request.thinking_budget,
            reasoning_effort=effort,
            response_format=_format(request),
        ),
    )


def _format(request: ResponsesRequest) -> p.ResponseFormat | None:
    form = None if request.text is None else request.text.format
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return p.ResponseFormat(type="json_object")
    return p.ResponseFormat(type="json_schema", json_schema=p.JsonSchemaFormat(schema=form.schema))


def input_messages(request: ResponsesRequest) -> list[p.Message]:
    """The input as messages: calls and reasoning join the message of the assistant that they belong to."""
    if isinstance(request.input, str):
        return [p.Message(role="user", content=request.input)]
    found: list[p.Message] = []
    shown: list[p.ContentPart] = []  # images of results, for the next message of the user
    for item in request.input:
        if shown and item.type != "function_call_output":
            is_said = item.type == "message" and item.role == "user"
            found.append(p.Message(role="user", content=[*shown, *(_parts(item.content) if is_said else ())]))
            shown = []
            if is_said:
                continue
        if item.type == "function_call_output":
            text, images = _result(item.output)
            found.append(p.Message(role="tool", tool_call_id=item.call_id, content=text))
            shown += images
        elif item.type == "message":
            if item.role is None:
                raise bad_request("a message needs a role", "input")
            last = found[-1] if found else None
            if item.role == "assistant" and last is not None and last.role == "assistant" and not last.content:
                last.content = _joined(item.content)  # the answer behind its reasoning
            else:
                found.append(p.Message(role=item.role, content=_content(item.content)))
        else:
            if not found or found[-1].role != "assistant":
                found.append(p.Message(role="assistant", content=""))
            _join(found[-1], item)
    return [*found, p.Message(role="user", content=shown)] if shown else found


def _parts(content: str | Sequence[ContentPart] | None) -> list[p.ContentPart]:
    """The parts of a message; a text is one."""
    found = _content(content)
    return [p.ContentPart(type="text", text=found)] if isinstance(found, str) else found


def _result(output: str | Sequence[ContentPart] | None) -> tuple[str, list[p.ContentPart]]:
    """The text of a tool's result, and its images."""
    content = _content(output)
    if isinstance(content, str):
        return content, []
    texts = [part.text or "" for part in content if part.type == "text"]
    return "".join(texts), [part for part in content if part.type == "image_url"]


def _join(message: p.Message, item: Item) -> None:
    if item.type == "reasoning":
        summary = _joined(item.summary)
        text = _joined(item.content) or summary
        message.reasoning_content = (message.reasoning_content or "") + text
        return
    if item.call_id is None or item.name is None:
        raise bad_request("a function_call needs a call_id and a name", "input")
    call = p.ToolCall(id=item.call_id, function=p.FunctionCall(name=item.name, arguments=item.arguments or "{}"))
    message.tool_calls = [*(message.tool_calls or []), call]


def _content(content: str | Sequence[ContentPart] | None) -> str | list[p.ContentPart]:
    """Text, or its parts if images are among them."""
    if isinstance(content, list) and any(part.image_url is not None and part.type != "input_image" for part in content):
        raise bad_request("a part with an image_url is an image: set its type to input_image", "input")
    if content is None or isinstance(content, str) or all(part.type != "input_image" for part in content):
        return _joined(content)
    found = []
    for part in content:
        if part.type != "input_image":
            found.append(p.ContentPart(type="text", text=part.text + (part.refusal or "")))
        elif part.image_url is None:
            raise bad_request("a part of type input_image needs its image_url, as data:image/png;base64,...", "input")
        else:
            found.append(p.ContentPart(type="image_url", image_url=part.image_url))
    return found


def _joined(content: str | Sequence[ContentPart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if any(part.type == "input_image" or part.image_url is not None for part in content):
        message = "parts of type input_image, with an image_url, belong to messages of the user: remove the others"
        raise bad_request(message, "input")
    return "".join(part.text + (part.refusal or "") for part in content)


# -- answers ----------------------------------------------------------------------------------------------------------
@dataclass(slots=True)
class ResponseCall:
    """One request, and the shapes of its answer."""

    turn: Turn
    request: ResponsesRequest
    messages: list[p.Message]  # of the conversation so far
    id: str = field(default_factory=lambda: f"resp_{secrets.token_hex(16)}")
    created: int = field(default_factory=lambda: int(time.time()))
    is_stored: bool = False
    _token_ids: list[int] = field(default_factory=list)  # of the output

    @property
    def job(self) -> Job:
        return self.turn.job

    def whole(self, whole: Whole, usage: Usage) -> dict[str, Any]:
        answer, writer = whole.answers[0], OutputWriter()
        parts = parts_of(self.turn, answer.text)
        writer.add(parts)
        writer.close("incomplete" if answer.finish_reason == "length" else "completed")
        count = self.turn.num_reasoning_tokens(answer.token_ids)
        response = ended(self._empty(), writer.items, answer.finish_reason, usage, count)
        self._remember(parts, answer.token_ids, response)
        return response

    def _empty(self) -> dict[str, Any]:
        model, limit = self.turn.job.model, self.request.max_output_tokens
        return response_object(self.request, self.id, self.created, model, limit)

    async def events(self, run: Run) -> AsyncIterator[list[Event]]:
        writer, reader, parts = OutputWriter(), self.turn.reader(), list[Part]()
        empty = self._empty()
        yield [writer.event(f"response.{kind}", response=empty) for kind in ("created", "in_progress")]
        while batch := await run.next():
            events: list[Event] = []
            for piece in (piece for news in batch for piece in news.pieces):
                self._token_ids += piece.token_ids
                fresh = reader.push(piece.text)
                if piece.finish_reason is not None:
                    fresh = [*fresh, *reader.finish()]
                parts += fresh
                events += writer.add(merged(fresh))
                if piece.finish_reason is not None:
                    status = "incomplete" if piece.finish_reason == "length" else "completed"
                    events += writer.close(status)
                    count = self.turn.num_reasoning_tokens(self._token_ids)
                    response = ended(empty, writer.items, piece.finish_reason, run.usage(), count)
                    self._remember(merged(parts), self._token_ids, response)
                    events.append(writer.event(f"response.{status}", response=response))
            yield events

    def _remember(self, parts: Sequence[Part], token_ids: list[int], response: dict[str, Any]) -> None:
        """Store the conversation with this answer."""
        if not self.request.store:
            return
        context, job = self.turn.context, self.job
        tokenizer = context.tokenizers.tokenizer
        reasoning, text = texts_of(parts)
        calls = [
            p.ToolCall(id=item["call_id"], function=p.FunctionCall(name=item["name"], arguments=item["arguments"]))
            for item in response["output"]
            if item["type"] == "function_call"
        ]
        answer = p.Message(
            role="assistant", content=text, tool_calls=calls or None, reasoning_content=reasoning or None
        )
        stored = Stored(
            [*self.messages, answer],
            self.turn.rendered,
            tokenizer.decode(token_ids, skip_special_tokens=False),
            response,
            input_items(self.request),
        )
        body, tenant = msgspec.msgpack.encode(stored), job.tenant
        tokens = array("i", [*job.prompts[0], *token_ids]).tobytes()
        context.engine.remember(
            self.id, tenant.name, job.request_id, body, tenant.share, salt=tenant.salt, token_ids=tokens
        )
        self.is_stored = True


def input_items(request: ResponsesRequest) -> list[dict[str, Any]]:
    """The input of a request as items, without the fields that the server ignores."""
    if isinstance(request.input, str):
        part = {"type": "input_text", "text": request.input}
        return [{"type": "message", "id": f"msg_{secrets.token_hex(12)}", "role": "user", "content": [part]}]
    return [_without_ignored(msgspec.to_builtins(item)) for item in request.input]


def _without_ignored(item: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in item.items() if name in KEPT or name not in IGNORED[Item]}
    for name in ("content", "output", "summary"):
        if isinstance(kept.get(name), list):
            notes = IGNORED[ContentPart].keys() - KEPT
            kept[name] = [{field: value for field, value in part.items() if field not in notes} for part in kept[name]]
    return kept


# -- handlers ---------------------------------------------------------------------------------------------------------
async def create(context: ServerContext, scope: Scope, receive: Receive, send: Send) -> None:
    request = decode(await read_body(scope, receive, context.limits), ResponsesRequest)
    if request.background:
        raise bad_request("responses do not run in the background: leave out `background`, or stream", "background")
    context.check_model(request.model)
    tenant, messages = tenant_of(scope), input_messages(request)
    history = None
    if request.previous_response_id is not None:
        found, stored = await _find(context, request.previous_response_id, tenant)
        messages = [*stored.messages, *messages]
        tokens = array("i", found.token_ids).tolist()
        history = History(stored.prompt + stored.answer, tokens, found.request_id)
    turn = await prepare(context, chat_request(request, messages), tenant, history)
    turn.job.keeps = request.store
    call = ResponseCall(turn, request, messages)
    try:
        await run_call(context, call, scope, receive, send, EVENTS)
    finally:
        if request.store and turn.job.request_id and not call.is_stored:  # its blocks are not needed
            context.engine.remember("", tenant.name, turn.job.request_id, b"")


async def _find(context: ServerContext, name: str, tenant: Tenant, *, drops: bool = False) -> tuple[Recalled, Stored]:
    found = await context.engine.recall(name, tenant.name, drops=drops, share=tenant.share, salt=tenant.salt)
    if not found.body:
        message = f"no response is stored under {name!r}: it was dropped or never stored"
        raise ApiError(404, message, "previous_response_not_found", param="previous_response_id")
    return found, msgspec.msgpack.decode(found.body, type=Stored)


async def retrieve(context: ServerContext, scope: Scope, receive: Receive, send: Send) -> None:
    _, stored = await _find(context, scope["path_params"]["id"], tenant_of(scope))
    await send_json(send, stored.response)


async def delete(context: ServerContext, scope: Scope, receive: Receive, send: Send) -> None:
    name = scope["path_params"]["id"]
    await _find(context, name, tenant_of(scope), drops=True)
    await send_json(send, {"id": name, "object": "response", "deleted": True})


async def list_input(context: ServerContext, scope: Scope, receive: Receive, send: Send) -> None:
    _, stored = await _find(context, scope["path_params"]["id"], tenant_of(scope))
    first, last = (stored.items[place].get("id") if stored.items else None for place in (0, -1))
    await send_json(send, {"object": "list", "data": stored.items, "first_id": first, "last_id": last,
                           "has_more": False})  # fmt: skip


ROUTES: tuple[RouteRow, ...] = (
    ("/v1/responses", "POST", create),
    ("/v1/responses/{id}", "GET", retrieve),
    ("/v1/responses/{id}", "DELETE", delete),
    ("/v1/responses/{id}/input_items", "GET", list_input),
)
