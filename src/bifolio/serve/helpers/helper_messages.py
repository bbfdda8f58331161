"""The messages between the front end and its helper processes: frames as in `api.messages`."""

from __future__ import annotations

from typing import Any

import msgspec


class Prepare(msgspec.Struct, tag="prepare"):
    """First message: the model whose template or tokenizer the tasks need, and the memory of each process."""

    model: str
    reads_tokenizer: bool  # grammars are compiled for it; templates do not need it
    memory_bytes: int  # of address space, above that of the idle process
    mmproj: str | None = None  # the file of its tower, as of `load_model`


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


class View(msgspec.Struct, tag="view"):
    """Decode an image and bring it into the sizes that the model reads."""

    data: bytes  # of a file


Task = Render | Check | View


class Run(msgspec.Struct, tag="run"):
    """Run a task in the process of a lane, which has no other task."""

    id: int
    lane: int
    cpu_seconds: float
    task: Task


class Cancel(msgspec.Struct, tag="cancel"):
    """End the process of a lane with its task."""

    lane: int


class Done(msgspec.Struct, tag="done"):
    """The task has ended; `text` is the rendered conversation."""

    text: str = ""


class Viewed(msgspec.Struct, tag="viewed"):
    """An image as the model reads it (`model.vision.tower.Picture`)."""

    text: str
    tiles: list[tuple[int, int, bytes]]  # height, width, u8[height, width, 3]


class Failed(msgspec.Struct, tag="failed"):
    """The task was refused, or has ended its process."""

    kind: str  # class name of the error, or one of the next three
    message: str = ""


SLOW = "Slow"  # it took all of its CPU seconds
KILLED = "Killed"  # it breached another limit
LOST = "Lost"  # its process was ended from outside
Result = Done | Viewed | Failed


class Outcome(msgspec.Struct, tag="outcome"):
    """The result of a task; the id of `Prepare` is 0."""

    id: int
    result: Result


to_helper_decoder = msgspec.msgpack.Decoder(Prepare | Run | Cancel)
from_helper_decoder = msgspec.msgpack.Decoder(Outcome)
task_decoder = msgspec.msgpack.Decoder(Run)
result_decoder = msgspec.msgpack.Decoder(Result)
