"""The tools of a request: their description for the template, the reader of calls, and the grammar of enforced ones."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bifolio.errors import RequestError
from bifolio.model.loaded import TextModel
from bifolio.serve.http.errors import bad_request
from bifolio.serve.protocols.openai_types import ChatRequest, NamedTool, Tool
from bifolio.text.chat_template import check_takes_tools
from bifolio.text.tools import tool_format
from bifolio.text.tools.events import AnswerReader, OneCall, ToolSpec
from bifolio.text.tools.format import LarkWriter, ToolFormat


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """The tools of a request, resolved."""

    shown: list[dict[str, Any]] | None = None  # to the template
    tools: Mapping[str, ToolSpec] = field(default_factory=dict)
    format: ToolFormat | None = None  # of the calls in the answer; None: calls are not looked for
    grammar: str | None = None  # of the kind "tools", where calls are enforced
    many: bool = True  # an answer may have several calls

    @property
    def has_channels(self) -> bool:
        return self.format is not None and self.format.has_channels

    def reader(self) -> AnswerReader | None:
        """A new reader of one answer."""
        if self.format is None:
            return None
        reader = self.format.reader(self.tools, self.grammar is not None)
        return reader if self.many else OneCall(reader)


def plan_tools(request: ChatRequest, model: TextModel) -> ToolPlan:
    """`tool_choice`: none, auto (the model decides), required (some tool), or a named one."""
    choice = request.tool_choice or ("auto" if request.tools else "none")
    if not request.tools:
        if choice not in ("none", "auto"):
            raise bad_request("tool_choice needs tools: pass them, or leave it out", "tool_choice")
        return _without_tools(model)
    if choice == "none":
        return _without_tools(model)
    template = model.chat_template or ""
    try:
        check_takes_tools(template)
    except RequestError as error:
        raise bad_request(str(error), "tools") from error
    specs = [_spec(tool) for tool in request.tools]
    tools = {spec.name: spec for spec in specs}
    if len(tools) < len(specs):
        raise bad_request(f"two tools have the same name, {_repeated(specs)!r}: rename one of them", "tools")
    form = tool_format(template)
    shown = [_shown(tool) for tool in request.tools]
    is_enforced = choice != "auto" or any(spec.is_strict for spec in specs)
    many = request.parallel_tool_calls is not False
    if not is_enforced:
        return ToolPlan(shown, tools, form, many=many)
    if isinstance(choice, NamedTool):
        if choice.function.name not in tools:
            raise bad_request(
                f"tool_choice names {choice.function.name!r}, which is not among the tools: name one of them",
                "tool_choice",
            )
        specs, many = [tools[choice.function.name]], False
    if choice != "auto":  # arguments of an enforced call follow their schema
        specs = [ToolSpec(spec.name, spec.parameters, True) for spec in specs]
    lark = LarkWriter(marker_ids(model, form.markers))
    form.write(lark, specs, must_call=choice != "auto", many=many)
    return ToolPlan(shown, tools, form, lark.source(), many)


def _without_tools(model: TextModel) -> ToolPlan:
    """Answers of models that write channels are read even without tools."""
    form = tool_format(model.chat_template)
    return ToolPlan(format=form if form.has_channels else None)


def marker_ids(model: TextModel, markers: tuple[str, ...]) -> dict[str, int]:
    """The markers that are tokens of their own."""
    tokenizer = model.tokenizer
    if tokenizer is None:
        return {}
    found = {marker: tokenizer.token_id(marker) for marker in markers}
    return {marker: token for marker, token in found.items() if token is not None and token in tokenizer.added_ids}


def _spec(tool: Tool) -> ToolSpec:
    return ToolSpec(tool.function.name, tool.function.parameters or {}, bool(tool.function.strict))


def _repeated(specs: list[ToolSpec]) -> str:
    """The first name that occurs twice."""
    names = [spec.name for spec in specs]
    return next(name for number, name in enumerate(names) if name in names[:number])


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


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"
