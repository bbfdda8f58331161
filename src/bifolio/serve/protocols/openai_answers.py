"""Answers of the HTTP API, in OpenAI's shapes."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

FinishReason = str  # stop, length, tool_calls, abort or error


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct):
    forced_tokens: int = 0  # appended without a step, because a grammar left no choice


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class WatchedDraft(msgspec.Struct):
    """Draft tokens that one pass verified."""

    index: int  # of the choice
    position: int  # of the first draft token among the output tokens
    tokens: list[str]
    accepted: int  # leading tokens that were right


class WatchedBeam(msgspec.Struct):
    """A beam that a step of a search chose."""

    parent: int  # its place among the running beams of the step before
    token: str
    token_id: int
    score: float  # summed logprob
    finished: bool


class WatchedBeamStep(msgspec.Struct):
    position: int
    beams: list[WatchedBeam]


class Steps(msgspec.Struct):
    """Speculation and beam search as they happen (`stream_options.include_steps`)."""

    drafts: list[WatchedDraft]
    beams: list[WatchedBeamStep]


class CompletionLogprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | msgspec.UnsetType | None = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    beam: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


class Completion(msgspec.Struct):
    """A whole answer, or one event of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    system_fingerprint: str | None = None
    steps: Steps | msgspec.UnsetType = msgspec.UNSET
    kv_transfer_params: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    receipt: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatTokenLogprob] | None
    refusal: None = None


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str


class CalledTool(msgspec.Struct):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class FunctionDelta(msgspec.Struct, omit_defaults=True):
    arguments: str | msgspec.UnsetType = msgspec.UNSET
    name: str | msgspec.UnsetType = msgspec.UNSET


class ToolDelta(msgspec.Struct, omit_defaults=True):
    """A call in a stream: the first delta has its id and name, the others continue its arguments."""

    index: int
    function: FunctionDelta
    id: str | msgspec.UnsetType = msgspec.UNSET
    type: Literal["function"] | msgspec.UnsetType = msgspec.UNSET


class ChatMessage(msgspec.Struct):
    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[CalledTool] | msgspec.UnsetType = msgspec.UNSET
    refusal: None = None


class ChatDelta(msgspec.Struct, omit_defaults=True):
    role: Literal["assistant"] | msgspec.UnsetType = msgspec.UNSET
    content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolDelta] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | msgspec.UnsetType | None = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    beam: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | msgspec.UnsetType | None = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletion(msgspec.Struct):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str | None = None
    kv_transfer_params: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    receipt: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


class ChatChunk(msgspec.Struct):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    system_fingerprint: str | None = None
    steps: Steps | msgspec.UnsetType = msgspec.UNSET


class BlockAddress(msgspec.Struct):
    """Where a prefill engine serves the blocks of its cache, on the host of this server."""

    remote_port: int


class ModelCard(msgspec.Struct):
    id: str
    created: int
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: str = "bifolio"
    has_chat_template: bool = False
    sampling_defaults: dict[str, float] = {}  # of requests that set none, under the names of the API
    parent: str | None = None  # of an adapter: the model that it changes
    reads_images: bool = False
    max_body_bytes: int = 0  # of a request


class ModelList(msgspec.Struct):
    data: list[ModelCard]
    object: Literal["list"] = "list"


class EmbeddingItem(msgspec.Struct):
    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct):
    data: list[EmbeddingItem]
    model: str
    usage: EmbeddingUsage
    object: Literal["list"] = "list"


class Tokens(msgspec.Struct):
    tokens: list[int]
    token_texts: list[str]
    count: int
    max_model_len: int


class Detokenized(msgspec.Struct):
    prompt: str


class Health(msgspec.Struct):
    status: str
