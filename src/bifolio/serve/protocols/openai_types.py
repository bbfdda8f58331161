"""Requests and responses of the HTTP API: OpenAI's fields, and our own beside them.

A field that is not here is refused by name, so that a typing error does not silently change a result. Fields that
are accepted and change nothing are listed in `IGNORED`, each with the reason. None means: the model's default.

Every field is bounded here, in number and in size: texts and lists by `max_length`, free JSON by `max_bytes`
(`serve.http.bounds`). A test fails when a field has no bound.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

MAX_STOPS = 32
MAX_PROMPTS = 256
MAX_TOP_LOGPROBS = 100
MAX_TEXT_CHARS = 4 << 20  # of a prompt or message; the limit on the body is lower than several of them
MAX_URL_CHARS = 45 << 20  # of an image as base64
MAX_TOKENS = 1 << 20  # ids of a prompt
BIG = 1 << 31

Count = Annotated[int, Meta(ge=0, le=BIG)]
Probability = Annotated[float, Meta(ge=0, le=1)]
Share = Annotated[float, Meta(gt=0, le=1)]
Name = Annotated[str, Meta(max_length=256)]
Word = Annotated[str, Meta(max_length=256)]  # of `stop`, `bad_words` and `dry_sequence_breakers`
Text = Annotated[str, Meta(max_length=MAX_TEXT_CHARS)]
Url = Annotated[str, Meta(max_length=MAX_URL_CHARS)]  # of an image, with its data
Stop = Word | Annotated[list[Word], Meta(max_length=MAX_STOPS)]
TokenIds = Annotated[list[Annotated[int, Meta(ge=0, le=BIG)]], Meta(max_length=MAX_TOKENS)]
Prompts = (
    Text
    | Annotated[list[Text | Annotated[int, Meta(ge=0, le=BIG)] | TokenIds], Meta(min_length=1, max_length=MAX_TOKENS)]
)
Schema = Annotated[dict[Name, Any], Meta(max_length=1024, extra={"max_bytes": 64 << 10})]
FreeJson = Annotated[dict[Name, Any], Meta(max_length=64, extra={"max_bytes": 64 << 10})]


class Strict(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Base of everything that a client sends."""


Ignored = dict[type[Strict], dict[str, str]]  # struct → name of a field, or path below the struct → reason


class StreamOptions(Strict, kw_only=True):
    include_usage: bool = False  # a last chunk with the usage of the whole request
    include_obfuscation: bool = False
    include_steps: bool = False  # beyond OpenAI: verified drafts and steps of a beam search, as they happen
    interval_ms: Annotated[int, Meta(ge=0, le=10_000)] = 0  # beyond OpenAI: events of this time are written together


class JsonSchemaFormat(Strict, kw_only=True):
    name: Name = "schema"
    description: Text | None = None
    schema: Schema | bool | None = None
    strict: bool | None = None  # the output always follows the schema


class ResponseFormat(Strict, kw_only=True):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    structures: Annotated[list[Schema], Meta(max_length=128)] | None = None  # of a structural tag: begin, schema, end
    triggers: Annotated[list[Word], Meta(max_length=128)] | None = None  # texts that begin a structure
    format: Schema | None = None  # the newer form of a structural tag


class StructuredOutputs(Strict, kw_only=True):
    """Exactly one of these constrains the text."""

    json: Schema | bool | None = None  # a JSON schema
    regex: Annotated[str, Meta(max_length=8 << 10)] | None = None
    choice: Annotated[list[Annotated[str, Meta(max_length=4096)]], Meta(min_length=1, max_length=4096)] | None = None
    grammar: Annotated[str, Meta(max_length=32 << 10)] | None = None  # Lark
    json_object: bool = False
    structural_tag: Annotated[str, Meta(max_length=128 << 10)] | Schema | None = None  # free text with schemas in it


class BeamSearch(Strict, kw_only=True):
    """Search for the most likely texts instead of drawing one; `n` of them are returned."""

    width: Annotated[int, Meta(ge=1, le=64)] = 4
    length_penalty: Annotated[float, Meta(ge=-100, le=100)] = 1.0
    early_stopping: bool | Literal["never"] = False
    num_groups: Annotated[int, Meta(ge=1, le=64)] = 1
    diversity_penalty: Annotated[float, Meta(ge=-100, le=100)] = 0.0


SessionSeconds = Annotated[float, Meta(gt=0, le=7 * 86400)]


class Generation(Strict, kw_only=True):
    """The fields that both kinds of completion share."""

    model: Name | None = None
    n: Annotated[int, Meta(ge=1, le=128)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Probability | None = None
    frequency_penalty: Annotated[float, Meta(ge=-100, le=100)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-100, le=100)] | None = None
    stop: Stop | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    logit_bias: (
        Annotated[
            dict[Annotated[str, Meta(max_length=10)], Annotated[float, Meta(ge=-1000, le=1000)]], Meta(max_length=4096)
        ]
        | None
    ) = None
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
    dry_sequence_breakers: Annotated[list[Word], Meta(max_length=64)] | None = None
    dry_range: Count | None = None
    xtc_probability: Probability | None = None
    xtc_threshold: Probability | None = None
    bad_words: Annotated[list[Word], Meta(max_length=256)] | None = None
    allowed_token_ids: TokenIds | None = None
    min_tokens: Count | None = None
    stop_token_ids: Annotated[list[Count], Meta(max_length=1024)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    beam_search: BeamSearch | None = None
    structured_outputs: StructuredOutputs | None = None
    return_token_ids: bool = False  # add `token_ids` to every choice
    priority: Annotated[int, Meta(ge=-1000, le=1000)] = 0  # smaller goes first
    cache_salt: Name | None = None  # share cached prefixes only with the same salt
    session_id: Name | None = None  # the conversation that the request belongs to
    ttl: SessionSeconds | None = None  # seconds for which the session's blocks are evicted last; default 300
    pin: bool = False  # until the session is released; it is saved when the server ends
    timeout: Annotated[float, Meta(gt=0, le=86400)] | None = None  # seconds
    receipt: bool = False  # the answer carries a receipt, which `bifolio replay` runs again
    kv_transfer_params: FreeJson | None = None  # prefill and decode on separate engines, in vLLM's terms
    # see IGNORED
    user: Name | None = None
    metadata: FreeJson | None = None
    store: bool | None = None
    service_tier: Name | None = None
    safety_identifier: Name | None = None
    prompt_cache_key: Name | None = None


class CompletionRequest(Generation, kw_only=True):
    prompt: Prompts
    max_tokens: Count | None = 16
    best_of: Annotated[int, Meta(ge=1, le=128)] | None = None
    echo: bool = False
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    suffix: Text | None = None  # the text after the gap, for models that fill in the middle
    add_special_tokens: bool = True


class ImageUrl(Strict, kw_only=True):
    url: Url
    detail: Literal["auto", "low", "high"] | None = None  # see IGNORED


class ContentPart(Strict, kw_only=True):
    """A part of a message; which fields are set depends on the type."""

    type: Literal["text", "image_url"]
    text: Text | None = None
    image_url: ImageUrl | Url | None = None


class FunctionCall(Strict, kw_only=True):
    name: Name
    arguments: Text  # JSON


class ToolCall(Strict, kw_only=True):
    id: Name
    function: FunctionCall
    type: Literal["function"] = "function"


class Message(Strict, kw_only=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[ContentPart], Meta(max_length=1024)] | None = None
    name: Name | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=128)] | None = None
    tool_call_id: Name | None = None
    reasoning_content: Text | None = None  # beyond OpenAI: the reasoning of an earlier answer
    reasoning: Text | None = None  # its other name
    refusal: Text | None = None


class FunctionDefinition(Strict, kw_only=True):
    name: Annotated[str, Meta(min_length=1, max_length=256)]
    description: Annotated[str, Meta(max_length=64 << 10)] | None = None
    parameters: Schema | None = None
    strict: bool | None = None


class Tool(Strict, kw_only=True):
    function: FunctionDefinition
    type: Literal["function"] = "function"


class NamedFunction(Strict, kw_only=True):
    name: Name


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
    chat_template_kwargs: FreeJson | None = None
    add_generation_prompt: bool = True
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    thinking_budget: Count | None = None  # beyond OpenAI: most tokens of reasoning
    separate_reasoning: bool = True  # beyond OpenAI; false: reasoning stays in the text, with its marks
    modalities: Annotated[list[Literal["text"]], Meta(max_length=1)] | None = None


class EmbeddingRequest(Strict, kw_only=True):
    input: Prompts
    model: Name | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Meta(ge=1, le=BIG)] | None = None  # the first ones of the model's
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=BIG)] | None = None  # beyond OpenAI; -1: to the context
    normalize: bool | None = None  # beyond OpenAI: vectors have a length of 1
    prompt_name: Name | None = None  # beyond OpenAI: of a prompt in the model's files that is put before each text
    user: Name | None = None


class TokenizeRequest(Strict, kw_only=True):
    prompt: Text | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=4096)] | None = None
    model: Name | None = None
    add_special_tokens: bool = True


class DetokenizeRequest(Strict, kw_only=True):
    tokens: Annotated[list[Count], Meta(max_length=1 << 17)]
    model: Name | None = None
    skip_special_tokens: bool = False


NO_ACCOUNTS = "the server keeps no accounts of users"
NO_STORE = "completions are not stored: use /v1/responses"
ONE_TIER = "there is one tier"
ALL_CACHED = "all prefixes are cached: cache_salt keeps them apart"
IGNORED: Ignored = {
    StreamOptions: {"include_obfuscation": "events are not padded"},
    JsonSchemaFormat: {
        "name": "the model does not see the name of a schema",
        "description": "the model does not see the description of a schema",
        "strict": "the output always follows the schema",
    },
    Generation: {
        "user": NO_ACCOUNTS,
        "safety_identifier": NO_ACCOUNTS,
        "metadata": NO_STORE,
        "store": NO_STORE,
        "service_tier": ONE_TIER,
        "prompt_cache_key": ALL_CACHED,
    },
    ImageUrl: {"detail": "the processor of the model decides on the size of an image"},
    Message: {"refusal": "chat templates have no place for it"},
    EmbeddingRequest: {"user": NO_ACCOUNTS},
}
