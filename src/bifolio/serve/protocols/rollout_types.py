"""Requests and answers of trainers: rollouts by token ids, and new weights."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from bifolio.serve.protocols.openai_types import (
    MAX_PROMPTS,
    Count,
    FreeJson,
    Name,
    Probability,
    Stop,
    Strict,
    Text,
    TokenIds,
)


class RolloutParams(Strict, kw_only=True):
    """vLLM's sampling parameters."""

    n: Annotated[int, Meta(ge=1, le=128)] = 1
    temperature: Annotated[float, Meta(ge=0, le=100)] = 1.0
    top_p: Probability = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=1 << 31)] = 0
    min_p: Probability = 0.0
    max_tokens: Count | None = 16
    min_tokens: Count = 0
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    stop: Stop | None = None
    stop_token_ids: Annotated[list[Count], Meta(max_length=1024)] | None = None
    ignore_eos: bool = False
    logprobs: Annotated[int, Meta(ge=0, le=100)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=100)] | None = None  # of each prompt token after the first
    presence_penalty: Annotated[float, Meta(ge=-100, le=100)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-100, le=100)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] = 1.0
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False


class RolloutRequest(Strict, kw_only=True):
    """One prompt as token ids."""

    token_ids: TokenIds
    sampling_params: RolloutParams = msgspec.field(default_factory=RolloutParams)
    model: Name | None = None
    request_id: Name | None = None  # the answer repeats it
    cache_salt: Name | None = None  # prefixes are shared only with the same salt, such as the version of the weights
    priority: Annotated[int, Meta(ge=-1000, le=1000)] = 0


class TrlRequest(Strict, kw_only=True):
    """TRL's `VLLMClient.generate`."""

    prompts: Annotated[list[Text | TokenIds], Meta(min_length=1, max_length=MAX_PROMPTS)]
    n: Annotated[int, Meta(ge=1, le=128)] = 1
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] = 1.0
    temperature: Annotated[float, Meta(ge=0, le=100)] = 1.0
    top_p: Probability = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=1 << 31)] = -1
    min_p: Probability = 0.0
    max_tokens: Count = 16
    logprobs: Annotated[int, Meta(ge=0, le=100)] | None = 0
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=1 << 31)] | None = None  # last tokens; -1: all that fit
    images: Annotated[list[None], Meta(max_length=MAX_PROMPTS)] | None = None  # of each prompt none
    structured_outputs_regex: Annotated[str, Meta(max_length=8 << 10)] | None = None
    generation_kwargs: FreeJson | None = None  # further sampling parameters


class WeightUpdate(Strict, kw_only=True):
    weight_dir: Annotated[str, Meta(max_length=4096)]  # on the server's machine: a folder, or a file of `write_delta`


class Communicator(Strict, kw_only=True):
    """TRL's `VLLMClient.init_communicator`: the address on which the server waits for the trainer."""

    host: Annotated[str, Meta(max_length=256)]
    port: Annotated[int, Meta(ge=1, le=65535)]
    world_size: Annotated[int, Meta(ge=2, le=1024)]
    client_device_uuid: Annotated[str, Meta(max_length=256)] | None = None  # of the trainer's GPU
    backend: Literal["nccl", "gloo"] | None = None  # None: NCCL where the engine is on a GPU and torch has it


class NamedTensor(Strict, kw_only=True):
    """TRL's `VLLMClient.update_named_param`: a tensor that the trainer broadcasts next."""

    name: Annotated[str, Meta(max_length=1024)]
    dtype: Annotated[str, Meta(max_length=32)]
    shape: Annotated[list[Count], Meta(max_length=8)]


class PromptLogprob(msgspec.Struct):
    logprob: float
    rank: int | None = None  # of a prompt's own tokens


class RolloutLogprob(msgspec.Struct):
    token: str  # "token_id:N"
    logprob: float
    top_logprobs: list[RolloutLogprob] = []


class RolloutLogprobs(msgspec.Struct):
    content: list[RolloutLogprob]


class RolloutChoice(msgspec.Struct):
    index: int
    token_ids: list[int]
    finish_reason: str | None
    logprobs: RolloutLogprobs | None


class Rollout(msgspec.Struct):
    request_id: str
    choices: list[RolloutChoice]
    weight_version: int  # of the weights that computed the last token
    num_weight_changes: int  # exchanges of weights while it was generated
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None  # by token id, the prompt's own token first


class TrlRollouts(msgspec.Struct):
    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    logprobs: list[list[list[float]]] | None  # of each token: its own, or the most likely ones
    logprob_token_ids: list[list[list[int]]] | None


class WeightStatus(msgspec.Struct):
    weight_version: int
    status: Literal["ok"] = "ok"


class SleepStatus(msgspec.Struct):
    is_sleeping: bool


class WorldSize(msgspec.Struct):
    world_size: int = 1
