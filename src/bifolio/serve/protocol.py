"""Requests and responses of the HTTP API: OpenAI's fields, and our own beside them.

A field that is not here is refused by name, so that a typing error does not silently change a result. Fields of OpenAI
that have no meaning here (`user`, `store`, ...) are accepted and ignored. None means: the model's default.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

MAX_STOPS = 32
MAX_PROMPTS = 256
MAX_TOP_LOGPROBS = 100
BIG = 1 << 31

Count = Annotated[int, Meta(ge=0, le=BIG)]
Probability = Annotated[float, Meta(ge=0, le=1)]
Share = Annotated[float, Meta(gt=0, le=1)]
Stop = str | Annotated[list[str], Meta(max_length=MAX_STOPS)]
TokenIds = list[Annotated[int, Meta(ge=0, le=BIG)]]


class Strict(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Base of everything that a client sends."""


class StreamOptions(Strict, kw_only=True):
    include_usage: bool = False  # a last chunk with the usage of the whole request
    include_obfuscation: bool = False  # ignored


class JsonSchemaFormat(Strict, kw_only=True):
    name: Annotated[str, Meta(max_length=256)] = "schema"
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None  # the output always follows the schema


class ResponseFormat(Strict, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Strict, kw_only=True):
    """Exactly one of these constrains the text."""

    json: dict[str, Any] | bool | None = None  # a JSON schema
    regex: str | None = None
    choice: Annotated[list[str], Meta(min_length=1, max_length=4096)] | None = None
    grammar: str | None = None  # Lark
    json_object: bool = False


class BeamSearch(Strict, kw_only=True):
    """Search for the most likely texts instead of drawing one; `n` of them are returned."""

    width: Annotated[int, Meta(ge=1, le=64)] = 4
    length_penalty: Annotated[float, Meta(ge=-100, le=100)] = 1.0
    early_stopping: bool | Literal["never"] = False
    num_groups: Annotated[int, Meta(ge=1, le=64)] = 1
    diversity_penalty: Annotated[float, Meta(ge=-100, le=100)] = 0.0


class Generation(Strict, kw_only=True):
    """The fields that both kinds of completion share."""

    model: str | None = None
    n: Annotated[int, Meta(ge=1, le=128)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Probability | None = None
    frequency_penalty: Annotated[float, Meta(ge=-100, le=100)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-100, le=100)] | None = None
    stop: Stop | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-1000, le=1000)]] | None = None
    response_format: ResponseFormat | None = None
    # beyond OpenAI
    top_k: Annotated[int, Meta(ge=-1, le=BIG)] | None = None
    min_p: Probability | None = None
    typical_p: Share | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    no_repeat_ngram_size: Annotated[int, Meta(ge=0, le=1024)] | None = None
    dry_multiplier: Annotated[float, Meta(ge=0, le=100)] | None = None
    dry_base: Annotated[float, Meta(ge=1, le=100)] | None = None
    dry_allowed_length: Annotated[int, Meta(ge=1, le=1024)] | None = None
    dry_sequence_breakers: Annotated[list[str], Meta(max_length=64)] | None = None
    dry_range: Count | None = None
    xtc_probability: Probability | None = None
    xtc_threshold: Probability | None = None
    bad_words: Annotated[list[str], Meta(max_length=1024)] | None = None
    allowed_token_ids: TokenIds | None = None
    min_tokens: Count | None = None
    stop_token_ids: Annotated[TokenIds, Meta(max_length=1024)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    beam_search: BeamSearch | None = None
    structured_outputs: StructuredOutputs | None = None
    return_token_ids: bool = False  # add `token_ids` to every choice
    priority: Annotated[int, Meta(ge=-1000, le=1000)] = 0  # smaller goes first
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None  # share cached prefixes only with the same salt
    timeout: Annotated[float, Meta(gt=0, le=86400)] | None = None  # seconds
    # ignored
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class CompletionRequest(Generation, kw_only=True):
    prompt: str | Annotated[list[str | int | TokenIds], Meta(min_length=1, max_length=1 << 20)]
    max_tokens: Count | None = 16
    best_of: Annotated[int, Meta(ge=1, le=128)] | None = None
    echo: bool = False
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    suffix: str | None = None  # only the empty one
    add_special_tokens: bool = True


class TextPart(Strict, kw_only=True):
    type: Literal["text"]
    text: str


class FunctionCall(Strict, kw_only=True):
    name: str
    arguments: str  # JSON


class ToolCall(Strict, kw_only=True):
    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class Message(Strict, kw_only=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None  # ignored


class FunctionDefinition(Strict, kw_only=True):
    name: Annotated[str, Meta(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict, kw_only=True):
    function: FunctionDefinition
    type: Literal["function"] = "function"


class NamedFunction(Strict, kw_only=True):
    name: str


class NamedTool(Strict, kw_only=True):
    function: NamedFunction
    type: Literal["function"] = "function"


class ChatRequest(Generation, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1, max_length=4096)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    reasoning_effort: str | None = None  # ignored
    modalities: list[Literal["text"]] | None = None


class EmbeddingRequest(Strict, kw_only=True):
    input: str | Annotated[list[str | int | TokenIds], Meta(min_length=1, max_length=1 << 20)]
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None  # only the model's own
    user: str | None = None


class TokenizeRequest(Strict, kw_only=True):
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=4096)] | None = None
    model: str | None = None
    add_special_tokens: bool = True


class DetokenizeRequest(Strict, kw_only=True):
    tokens: Annotated[TokenIds, Meta(max_length=1 << 20)]
    model: str | None = None
    skip_special_tokens: bool = False
