"""Tools: their description for the template, enforced calls, and calls found in the text."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass, field
from typing import Any

from bifolio.serve.errors import bad_request
from bifolio.serve.protocol import ChatRequest, NamedTool, Tool
from bifolio.serve.responses import CalledFunction, CalledTool

OPEN_TAG, CLOSE_TAG = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """The tools of a request, resolved."""

    shown: list[dict[str, Any]] | None = None  # to the template
    schema: str | None = None  # the JSON schema that a call must follow, when there must be one
    is_watched: bool = False  # calls are looked for in the text


def plan_tools(request: ChatRequest, template: str | None) -> ToolPlan:
    """`tool_choice`: none, auto (the model decides), required (some tool), or a named one."""
    choice = request.tool_choice or ("auto" if request.tools else "none")
    if not request.tools:
        if choice not in ("none", "auto"):
            raise bad_request("tool_choice needs tools", "tool_choice")
        return ToolPlan()
    if choice == "none":
        return ToolPlan()
    if "tools" not in (template or ""):
        raise bad_request("the chat template of this model knows no tools: ask without them", "tools")
    names = [tool.function.name for tool in request.tools]
    if len(set(names)) < len(names):
        raise bad_request("two tools have the same name", "tools")
    shown = [_shown(tool) for tool in request.tools]
    if choice == "auto":
        return ToolPlan(shown, is_watched=True)
    wanted = request.tools
    if isinstance(choice, NamedTool):
        wanted = [tool for tool in request.tools if tool.function.name == choice.function.name]
        if not wanted:
            raise bad_request(
                f"tool_choice names {choice.function.name!r}, which is not among the tools", "tool_choice"
            )
    return ToolPlan(shown, schema=json.dumps(_call_schema(wanted)))


def _shown(tool: Tool) -> dict[str, Any]:
    function = tool.function
    return {
        "type": "function",
        "function": {
            "name": function.name,
            "description": function.description or "",
            "parameters": function.parameters or {"type": "object", "properties": {}},
        },
    }


def _call_schema(tools: list[Tool]) -> dict[str, Any]:
    """One object `{"name": ..., "arguments": {...}}` for each tool; references stay inside their own parameters."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.function.name},
                "arguments": tool.function.parameters or {"type": "object"},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    return calls[0] if len(calls) == 1 else {"anyOf": calls}


def called(name: str, arguments: Any, index: int | None = None) -> CalledTool:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    tool = CalledTool(f"call_{secrets.token_hex(12)}", CalledFunction(name, text))
    if index is not None:
        tool.index = index
    return tool


def read_call(text: str) -> tuple[str, Any] | None:
    """(name, arguments) of `{"name": ..., "arguments" or "parameters": ...}`; None when it is something else."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    return call["name"], call.get("arguments", call.get("parameters", {}))


@dataclass(slots=True)
class CallScanner:
    """Takes tool calls out of text that arrives in pieces. Text that may be the beginning of a call is held back."""

    names: frozenset[str]
    found: list[tuple[str, Any]] = field(default_factory=list)
    _held: str = ""
    _inside: bool = False

    def push(self, text: str) -> str:
        """Text that is certainly no part of a call."""
        self._held += text
        out = ""
        while True:
            if self._inside:
                end = self._held.find(CLOSE_TAG)
                if end < 0:
                    return out
                out += self._take(self._held[:end], CLOSE_TAG)
                self._held = self._held[end + len(CLOSE_TAG) :]
                self._inside = False
                continue
            start = self._held.find(OPEN_TAG)
            if start >= 0:
                out += self._held[:start]
                self._held = self._held[start + len(OPEN_TAG) :]
                self._inside = True
                continue
            keep = _partial(self._held, OPEN_TAG)
            out += self._held[: len(self._held) - keep]
            self._held = self._held[len(self._held) - keep :]
            return out

    def finish(self) -> str:
        """The rest, at the end of the text; a call whose closing tag never came counts if it is complete."""
        held, self._held = self._held, ""
        if not self._inside:
            return held
        self._inside = False
        return self._take(held, "")

    def _take(self, inner: str, tail: str) -> str:
        call = read_call(inner.strip())
        if call is not None and call[0] in self.names:
            self.found.append(call)
            return ""
        return OPEN_TAG + inner + tail


def _partial(text: str, tag: str) -> int:
    """Length of the longest end of `text` that begins `tag`."""
    for length in range(min(len(text), len(tag) - 1), 0, -1):
        if tag.startswith(text[-length:]):
            return length
    return 0
