"""Requests of Anthropic's Messages API. Every field is bounded, as in `serve.protocols.openai_types`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from bifolio.serve.protocols.openai_types import (
    MAX_STOPS,
    NO_ACCOUNTS,
    ONE_TIER,
    Count,
    FreeJson,
    Ignored,
    Name,
    Probability,
    Schema,
    Strict,
    Text,
    Url,
    Word,
)

Input = Annotated[dict[Name, Any], Meta(max_length=1024, extra={"max_bytes": 1 << 20})]


class CacheControl(Strict, kw_only=True):
    type: Literal["ephemeral"] = "ephemeral"
    ttl: Name | None = None


class ResultBlock(Strict, kw_only=True):
    """A part of the system prompt."""

    type: Literal["text"] = "text"
    text: Text
    cache_control: CacheControl | None = None


class ImageSource(Strict, kw_only=True):
    type: Literal["base64", "url"]
    media_type: Name | None = None
    data: Url | None = None
    url: Url | None = None


class ResultPart(Strict, kw_only=True):
    """A part of the result of a tool: a text or an image."""

    type: Literal["text", "image"] = "text"
    text: Text | None = None
    source: ImageSource | None = None
    cache_control: CacheControl | None = None


class Block(Strict, kw_only=True):
    """A part of a message; which fields are set depends on the type."""

    type: Literal["text", "image", "tool_use", "tool_result", "thinking", "redacted_thinking"]
    text: Text | None = None
    source: ImageSource | None = None
    id: Name | None = None
    name: Name | None = None
    input: Input | None = None
    tool_use_id: Name | None = None
    content: Text | Annotated[list[ResultPart], Meta(max_length=1024)] | None = None
    is_error: bool | None = None
    thinking: Text | None = None
    signature: Text | None = None
    data: Text | None = None
    cache_control: CacheControl | None = None


class AnthropicMessage(Strict, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: Text | Annotated[list[Block], Meta(max_length=1024)]


class AnthropicTool(Strict, kw_only=True):
    name: Annotated[str, Meta(min_length=1, max_length=256)]
    input_schema: Schema
    description: Annotated[str, Meta(max_length=64 << 10)] | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None


class AnthropicToolChoice(Strict, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool = False


class ThinkingConfig(Strict, kw_only=True):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Count | None = None
    display: Name | None = None


class OutputFormat(Strict, kw_only=True):
    type: Literal["json_schema"]
    schema: Schema


class OutputConfig(Strict, kw_only=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Conversation(Strict, kw_only=True):
    """The fields that both requests share."""

    model: Name
    messages: Annotated[list[AnthropicMessage], Meta(min_length=1, max_length=4096)]
    system: Text | Annotated[list[ResultBlock], Meta(max_length=256)] | None = None
    tools: Annotated[list[AnthropicTool], Meta(max_length=128)] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None


class CountTokensRequest(Conversation, kw_only=True):
    """The tokens of a conversation are counted, and nothing is generated."""


class MessagesRequest(Conversation, kw_only=True):
    max_tokens: Count
    stop_sequences: Annotated[list[Word], Meta(max_length=MAX_STOPS)] | None = None
    stream: bool = False
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1 << 31)] | None = None
    metadata: FreeJson | None = None
    service_tier: Name | None = None
    container: Name | None = None
    context_management: FreeJson | None = None


CACHED = "all prefixes are cached"
NOT_IN_PROMPT = "it does not change the tokens of the prompt"
IGNORED: Ignored = {
    ResultBlock: {"cache_control": CACHED},
    ResultPart: {"cache_control": CACHED},
    Block: {
        "cache_control": CACHED,
        "signature": "reasoning is not signed",
        "data": "encrypted reasoning cannot be read",
    },
    AnthropicTool: {"cache_control": CACHED},
    Conversation: {"cache_control": CACHED},
    ThinkingConfig: {"display": "reasoning is always shown"},
    CountTokensRequest: {
        "tool_choice.name": NOT_IN_PROMPT,
        "tool_choice.disable_parallel_tool_use": NOT_IN_PROMPT,
        "thinking.budget_tokens": NOT_IN_PROMPT,
        "output_config.format": NOT_IN_PROMPT,
        "tools.strict": NOT_IN_PROMPT,
    },
    MessagesRequest: {
        "metadata": NO_ACCOUNTS,
        "service_tier": ONE_TIER,
        "container": "the server runs no code",
        "context_management": "the messages of a request are never edited",
    },
}
