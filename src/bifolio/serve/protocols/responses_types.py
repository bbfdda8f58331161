"""Requests of OpenAI's Responses API. Every field is bounded, as in `serve.protocols.openai_types`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from bifolio.serve.protocols.openai_types import (
    ALL_CACHED,
    NO_ACCOUNTS,
    ONE_TIER,
    Count,
    FreeJson,
    Ignored,
    Message,
    Name,
    Probability,
    Schema,
    SessionSeconds,
    Strict,
    Text,
    Url,
)

Notes = Annotated[list[FreeJson], Meta(max_length=128)]


class ContentPart(Strict, kw_only=True):
    """A part of a message, or of reasoning."""

    type: Literal["input_text", "input_image", "output_text", "text", "reasoning_text", "summary_text", "refusal"]
    text: Text = ""
    refusal: Text | None = None
    image_url: Url | None = None
    detail: Name | None = None  # see IGNORED, as the next two
    annotations: Notes | None = None
    logprobs: Notes | None = None


class Item(Strict, kw_only=True):
    """An input item; which fields are set depends on the type."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Text | Annotated[list[ContentPart], Meta(max_length=1024)] | None = None
    id: Name | None = None
    status: Name | None = None
    call_id: Name | None = None
    name: Name | None = None
    arguments: Text | None = None
    output: Text | Annotated[list[ContentPart], Meta(max_length=1024)] | None = None
    summary: Annotated[list[ContentPart], Meta(max_length=128)] | None = None
    encrypted_content: Text | None = None
    phase: Name | None = None
    caller: FreeJson | None = None
    namespace: Name | None = None


class ResponsesTool(Strict, kw_only=True):
    name: Annotated[str, Meta(min_length=1, max_length=256)]
    type: Literal["function"] = "function"
    description: Annotated[str, Meta(max_length=64 << 10)] | None = None
    parameters: Schema | None = None
    strict: bool | None = None


class ToolName(Strict, kw_only=True):
    name: Name
    type: Literal["function"] = "function"


class ReasoningOptions(Strict, kw_only=True):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Name | None = None
    generate_summary: Name | None = None


class TextFormat(Strict, kw_only=True):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: Name | None = None
    schema: Schema | None = None
    description: Annotated[str, Meta(max_length=64 << 10)] | None = None
    strict: bool | None = None


class TextOptions(Strict, kw_only=True):
    format: TextFormat | None = None
    verbosity: Name | None = None


class ResponsesStreamOptions(Strict, kw_only=True):
    include_obfuscation: bool = False


class ResponsesRequest(Strict, kw_only=True):
    input: Text | Annotated[list[Item], Meta(min_length=1, max_length=4096)]
    model: Name | None = None
    instructions: Text | None = None
    previous_response_id: Name | None = None
    store: bool = True
    session_id: Name | None = None  # the conversation that the request belongs to
    ttl: SessionSeconds | None = None  # seconds for which the session's blocks are evicted last; default 300
    pin: bool = False  # until the session is released; it is saved when the server ends
    stream: bool = False
    stream_options: ResponsesStreamOptions | None = None
    max_output_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Probability | None = None
    tools: Annotated[list[ResponsesTool], Meta(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolName | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    metadata: FreeJson | None = None
    truncation: Literal["auto", "disabled"] | None = None
    background: bool | None = None  # true is refused
    # beyond OpenAI
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    thinking_budget: Count | None = None
    # see IGNORED
    include: Annotated[list[Name], Meta(max_length=32)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=0)] | None = None
    max_tool_calls: Count | None = None
    user: Name | None = None
    service_tier: Name | None = None
    safety_identifier: Name | None = None
    prompt_cache_key: Name | None = None
    prompt_cache_retention: Name | None = None


class Stored(msgspec.Struct, array_like=True):
    """A conversation as it is stored: enough for a follow-up, and for `GET`."""

    messages: list[Message]  # without instructions
    prompt: str  # as the template rendered it
    answer: str  # all tokens of the output as text
    response: dict[str, Any]
    items: list[dict[str, Any]]  # the input of this turn


OF_OPENAI = "it is a note of OpenAI's servers"
STORED = "the model does not see it; the stored input has it"
NO_SUMMARIES = "reasoning is returned as it is, not summarised"
IGNORED: Ignored = {
    ContentPart: {
        "detail": "the processor of the model decides on the size of an image",
        "annotations": "the model does not see notes on a text",
        "logprobs": "they belong to an answer",
    },
    Item: {
        "id": STORED,
        "status": STORED,
        "encrypted_content": "encrypted reasoning cannot be read",
        "phase": OF_OPENAI,
        "caller": OF_OPENAI,
        "namespace": OF_OPENAI,
    },
    ReasoningOptions: {"summary": NO_SUMMARIES, "generate_summary": NO_SUMMARIES},
    TextFormat: {
        "name": "the model does not see the name of a schema",
        "description": "the model does not see the description of a schema",
        "strict": "the output always follows the schema",
    },
    TextOptions: {"verbosity": "models have no such setting: ask for it in the instructions"},
    ResponsesStreamOptions: {"include_obfuscation": "events are not padded"},
    ResponsesRequest: {
        "truncation": "a conversation that does not fit is always refused",
        "include": "the answer has everything that there is",
        "max_tool_calls": "the server calls no tools of its own",
        "user": NO_ACCOUNTS,
        "safety_identifier": NO_ACCOUNTS,
        "service_tier": ONE_TIER,
        "prompt_cache_key": ALL_CACHED,
        "prompt_cache_retention": "blocks stay until others need their place",
    },
}
