"""Requests and answers of `/v1/snapshots`, and of llama.cpp's slot files."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from bifolio.serve.protocols.branch_types import DEFAULT_SECONDS
from bifolio.serve.protocols.openai_types import Message, Name, Strict, Text, TokenIds


class SnapshotSave(Strict, kw_only=True):
    """Exactly one of `branch`, `response`, `prompt` and `messages`."""

    id: Name | None = None  # name of the snapshot; default: a new one
    branch: Name | None = None  # id of a branch
    response: Name | None = None  # id of a stored response
    prompt: Text | TokenIds | None = None  # a text or token ids
    messages: Annotated[list[Message], Meta(min_length=1, max_length=4096)] | None = None  # a conversation
    model: Name | None = None
    cache_salt: Name | None = None  # that the prompt was sent with
    add_special_tokens: bool = True


class SnapshotRestore(Strict, kw_only=True):
    ttl: Annotated[float, Meta(gt=0, le=3600)] = DEFAULT_SECONDS  # of the branch, in seconds without use
    recompute: bool = False  # a snapshot of another arithmetic is computed again
    model: Name | None = None  # the adapter that it was saved with


class SnapshotCard(msgspec.Struct):
    """A snapshot."""

    id: str
    num_tokens: int
    bytes: int
    created: int
    kind: Literal["snapshot", "response"]  # response: one that the server saved itself
    object: Literal["snapshot"] = "snapshot"


class SnapshotList(msgspec.Struct):
    data: list[SnapshotCard]
    object: Literal["list"] = "list"


class RemovedSnapshot(msgspec.Struct):
    id: str
    deleted: bool = True
    object: Literal["snapshot"] = "snapshot"


class SlotFile(Strict, kw_only=True):
    """The body of `/slots/{id}?action=save` and `restore`."""

    filename: Name  # name of the snapshot


class SlotResult(msgspec.Struct, kw_only=True):
    """llama.cpp's answer: the tokens and bytes of an action."""

    id_slot: int
    filename: str | msgspec.UnsetType = msgspec.UNSET
    n_saved: int | msgspec.UnsetType = msgspec.UNSET
    n_written: int | msgspec.UnsetType = msgspec.UNSET
    n_restored: int | msgspec.UnsetType = msgspec.UNSET
    n_read: int | msgspec.UnsetType = msgspec.UNSET
    n_erased: int | msgspec.UnsetType = msgspec.UNSET
    timings: dict[str, float] | msgspec.UnsetType = msgspec.UNSET
