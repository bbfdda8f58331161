"""The messages between the front end and its helper processes: frames as in `api.messages`."""

from __future__ import annotations

from typing import Any

import msgspec


class Prepare(msgspec.Struct, tag="prepare"):
    """First message: the model whose template or tokenizer the tasks need, and the limits of each task."""

    model: str
    reads_tokenizer: bool  # grammars are compiled for it; templates do not need it
    cpu_seconds: int
    memory_bytes: int  # of address space, above that of the idle process


class Render(msgspec.Struct, tag="render"):
    """Render the chat template."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    add_generation_prompt: bool
    variables: dict[str, Any]


class Check(msgspec.Struct, tag="check"):
    """Compile a grammar and follow it for some tokens."""

    kind: str
    text: str


class Done(msgspec.Struct, tag="done"):
    """The task has ended; `text` is the rendered conversation."""

    text: str = ""


class Failed(msgspec.Struct, tag="failed"):
    """The task was refused."""

    kind: str  # class name of the error
    message: str


Task = Render | Check
ToHelper = Prepare | Render | Check
FromHelper = Done | Failed

to_helper_decoder = msgspec.msgpack.Decoder(ToHelper)
from_helper_decoder = msgspec.msgpack.Decoder(FromHelper)
