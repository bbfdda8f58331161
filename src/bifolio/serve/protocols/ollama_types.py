"""Requests of ollama's API. Every field is bounded, as in `serve.protocols.openai_types`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from bifolio.serve.protocols.openai_types import (
    BIG,
    Count,
    Ignored,
    Name,
    Probability,
    Schema,
    Share,
    Stop,
    Strict,
    Text,
    Tool,
    Url,
)

Whole = Annotated[int, Meta(ge=-BIG, le=BIG)]
Setting = Annotated[float, Meta(ge=-1e9, le=1e9)] | bool
Images = Annotated[list[Url], Meta(max_length=256)]  # base64
KeepAlive = Annotated[float, Meta(ge=-1e9, le=1e9)] | Name
Think = bool | Literal["low", "medium", "high", "max"]
Form = Literal["", "json"] | Schema


class OllamaOptions(Strict, kw_only=True):
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=BIG)] | None = None
    top_p: Probability | None = None
    min_p: Probability | None = None
    typical_p: Share | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    num_predict: Annotated[int, Meta(ge=-2, le=BIG)] | None = None  # negative: no limit
    repeat_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-100, le=100)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-100, le=100)] | None = None
    stop: Stop | None = None
    repeat_last_n: Annotated[int, Meta(ge=-1, le=BIG)] | None = None  # 0: no penalties; else all tokens count
    mirostat: Setting | None = None  # refused, but for the value that means "off"
    tfs_z: Setting | None = None
    # see IGNORED
    num_ctx: Setting | None = None
    num_batch: Setting | None = None
    num_gpu: Setting | None = None
    main_gpu: Setting | None = None
    num_thread: Setting | None = None
    num_keep: Setting | None = None
    numa: Setting | None = None
    low_vram: Setting | None = None
    f16_kv: Setting | None = None
    use_mmap: Setting | None = None
    use_mlock: Setting | None = None
    logits_all: Setting | None = None
    vocab_only: Setting | None = None
    embedding_only: Setting | None = None
    mirostat_tau: Setting | None = None
    mirostat_eta: Setting | None = None
    penalize_newline: Setting | None = None


class OllamaBase(Strict, kw_only=True):
    model: Name
    stream: bool = True
    options: OllamaOptions | None = None
    format: Form | None = None
    keep_alive: KeepAlive | None = None
    think: Think | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=100)] | None = None


class GenerateRequest(OllamaBase, kw_only=True):
    prompt: Text = ""
    system: Text | None = None
    raw: bool | None = None
    suffix: Text | None = None  # the text after the gap, for models that fill in the middle
    template: Text | None = None  # only the model's own
    context: Annotated[list[Count], Meta(max_length=1 << 17)] | None = None  # only the empty one
    images: Images | None = None


class OllamaFunction(Strict, kw_only=True):
    name: Name
    arguments: Annotated[dict[Name, Any], Meta(max_length=1024, extra={"max_bytes": 1 << 20})]
    index: Count | None = None


class OllamaCall(Strict, kw_only=True):
    function: OllamaFunction
    id: Name | None = None


class OllamaMessage(Strict, kw_only=True):
    role: Literal["system", "user", "assistant", "tool"]
    content: Text | None = None
    thinking: Text | None = None
    tool_calls: Annotated[list[OllamaCall], Meta(max_length=128)] | None = None
    tool_name: Name | None = None
    tool_call_id: Name | None = None
    images: Images | None = None


class OllamaChatRequest(OllamaBase, kw_only=True):
    messages: Annotated[list[OllamaMessage], Meta(max_length=4096)]
    tools: Annotated[list[Tool], Meta(max_length=128)] | None = None


class EmbedRequest(Strict, kw_only=True):
    model: Name
    input: Text | Annotated[list[Text], Meta(min_length=1, max_length=256)]
    truncate: bool | None = None
    options: OllamaOptions | None = None
    keep_alive: KeepAlive | None = None
    dimensions: Count | None = None  # the first ones of the model's; 0: all


class OldEmbedRequest(Strict, kw_only=True):
    model: Name
    prompt: Text
    options: OllamaOptions | None = None
    keep_alive: KeepAlive | None = None


class ShowRequest(Strict, kw_only=True):
    model: Name | None = None
    name: Name | None = None  # its older name
    verbose: bool | None = None


class PullRequest(Strict, kw_only=True):
    model: Name | None = None
    name: Name | None = None
    stream: bool = True
    insecure: bool | None = None


NEUTRAL = {"mirostat": 0, "tfs_z": 1}  # other values are refused
AT_START = "it is decided when the server starts: see `bifolio serve --help-all`"
NO_MIROSTAT = "it belongs to mirostat, which must be 0"
ONE_MODEL = "the model of the server stays loaded"
IGNORED: Ignored = {
    OllamaOptions: {
        **dict.fromkeys(
            ("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "numa", "low_vram", "f16_kv", "use_mmap",
             "use_mlock", "logits_all", "vocab_only", "embedding_only"),
            AT_START,
        ),
        "num_keep": "the context is never shifted",
        "mirostat_tau": NO_MIROSTAT,
        "mirostat_eta": NO_MIROSTAT,
        "penalize_newline": "ollama ignores it as well",
    },
    OllamaBase: {"keep_alive": ONE_MODEL},
    OllamaFunction: {"index": "calls are in the order of the list"},
    EmbedRequest: {"options": "embeddings are not sampled", "keep_alive": ONE_MODEL},
    OldEmbedRequest: {"options": "embeddings are not sampled", "keep_alive": ONE_MODEL},
    ShowRequest: {"verbose": "the answer has everything that there is"},
    PullRequest: {"insecure": "files are checked by their digests"},
}  # fmt: skip
