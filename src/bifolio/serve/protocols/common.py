"""Shared by the adapters of protocols."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from bifolio.serve.http.auth import Receive, Scope, Send
from bifolio.serve.http.context import ServerContext
from bifolio.serve.http.encoding import encode_json
from bifolio.serve.http.errors import bad_request
from bifolio.serve.http.turn import Turn
from bifolio.text.tools.events import Part, merged

Handler = Callable[[ServerContext, Scope, Receive, Send], Awaitable[None]]
RouteRow = tuple[str, str, Handler]  # path, method, handler


def refuse_others(options: msgspec.Struct, neutral: Mapping[str, float]) -> None:
    """Refuse options that are accepted only with the value that switches them off."""
    for name, value in neutral.items():
        if getattr(options, name) not in (None, value):
            raise bad_request(f"{name} is not supported: leave it out, or pass {json.dumps(value)}", name)


def named_event(name: str, payload: Any) -> bytes:
    """A server-sent event with a name."""
    return b"event: " + name.encode() + b"\ndata: " + encode_json(payload) + b"\n\n"


def json_line(payload: Any) -> bytes:
    return encode_json(payload) + b"\n"


def parts_of(turn: Turn, text: str) -> Sequence[Part]:
    """The parts of a whole answer."""
    reader = turn.reader()
    return merged([*reader.push(text), *reader.finish()])


def given(**fields: Any) -> dict[str, Any]:
    """The fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}
