"""Requests and answers of `/v1/branches`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from bifolio.serve.protocols.openai_types import (
    MAX_TOP_LOGPROBS,
    Generation,
    Message,
    Name,
    Strict,
    Text,
    TokenIds,
)

DEFAULT_SECONDS = 600.0


class BranchOpen(Strict, kw_only=True):
    """Exactly one of `prompt` and `messages`."""

    prompt: Text | TokenIds | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=4096)] | None = None
    model: Name | None = None
    ttl: Annotated[float, Meta(gt=0, le=3600)] = DEFAULT_SECONDS  # seconds without use after which it is closed
    cache_salt: Name | None = None  # share cached prefixes only with the same salt
    add_special_tokens: bool = True


class BranchFork(Strict, kw_only=True):
    n: Annotated[int, Meta(ge=1, le=256)] = 1  # number of forks


class BranchAppend(Strict, kw_only=True):
    prompt: Text | TokenIds  # text or token ids to add
    to_answer: bool = False  # the tokens continue the answer: grammars and penalties read them


class BranchTruncate(Strict, kw_only=True):
    num_tokens: Annotated[int, Meta(ge=-(1 << 20), le=1 << 20)]  # to keep; a negative number is counted from the end


class BranchScore(Strict, kw_only=True):
    continuations: Annotated[list[Text | TokenIds], Meta(min_length=1, max_length=256)]  # texts or lists of token ids


class BranchGenerate(Generation, kw_only=True):
    max_tokens: Annotated[int, Meta(ge=1, le=1 << 31)] | None = 16
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    advance: bool = True  # the branch takes the output over


class BranchCard(msgspec.Struct):
    """A branch."""

    id: str
    num_tokens: int
    num_prompt_tokens: int  # tokens before the answer
    ttl: float
    model: str  # the base, or the adapter that it was opened with
    object: Literal["branch"] = "branch"
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET  # of `GET` alone
    blocks: list[int] | msgspec.UnsetType = msgspec.UNSET  # of the cache, of `GET` alone; forks share them


class BranchList(msgspec.Struct):
    data: list[BranchCard]
    object: Literal["list"] = "list"


class ClosedBranch(msgspec.Struct):
    id: str
    deleted: bool = True
    object: Literal["branch"] = "branch"


class ContinuationScore(msgspec.Struct):
    """The logprobs of one continuation."""

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]  # 1: the most likely token
    total: float
    is_greedy: bool


class ScoreUsage(msgspec.Struct):
    prompt_tokens: int  # of all continuations


class ScoreList(msgspec.Struct):
    data: list[ContinuationScore]
    usage: ScoreUsage
    object: Literal["list"] = "list"
