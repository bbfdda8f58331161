"""Requests of ollama's API. Every field is bounded, as in `serve.protocol`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from bifolio.serve.protocol import BIG, Count, Name, Probability, Schema, Share, Stop, Strict, Text, Tool

Whole = Annotated[int, Meta(ge=-BIG, le=BIG)]
Ignored = Annotated[float, Meta(ge=-1e9, le=1e9)] | bool
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
    # about the process and samplers that this server does not have: ignored
    num_ctx: Ignored | None = None
    num_batch: Ignored | None = None
    num_gpu: Ignored | None = None
    main_gpu: Ignored | None = None
    num_thread: Ignored | None = None
    num_keep: Ignored | None = None
    numa: Ignored | None = None
    low_vram: Ignored | None = None
    f16_kv: Ignored | None = None
    use_mmap: Ignored | None = None
    use_mlock: Ignored | None = None
    logits_all: Ignored | None = None
    vocab_only: Ignored | None = None
    embedding_only: Ignored | None = None
    repeat_last_n: Ignored | None = None
    tfs_z: Ignored | None = None
    mirostat: Ignored | None = None
    mirostat_tau: Ignored | None = None
    mirostat_eta: Ignored | None = None
    penalize_newline: Ignored | None = None


class OllamaBase(Strict, kw_only=True):
    model: Name
    stream: bool = True
    options: OllamaOptions | None = None
    format: Form | None = None
    keep_alive: KeepAlive | None = None  # ignored
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
    images: Annotated[list[Name], Meta(max_length=0)] | None = None


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
    images: Annotated[list[Name], Meta(max_length=0)] | None = None


class OllamaChatRequest(OllamaBase, kw_only=True):
    messages: Annotated[list[OllamaMessage], Meta(max_length=4096)]
    tools: Annotated[list[Tool], Meta(max_length=128)] | None = None


class EmbedRequest(Strict, kw_only=True):
    model: Name
    input: Text | Annotated[list[Text], Meta(min_length=1, max_length=256)]
    truncate: bool | None = None
    options: OllamaOptions | None = None
    keep_alive: KeepAlive | None = None  # ignored
    dimensions: Count | None = None  # only the model's own


class ShowRequest(Strict, kw_only=True):
    model: Name | None = None
    name: Name | None = None  # its older name
    verbose: bool | None = None


class PullRequest(Strict, kw_only=True):
    model: Name | None = None
    name: Name | None = None
    stream: bool = True
    insecure: bool | None = None  # ignored
