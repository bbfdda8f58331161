"""Chat templates: rendered in jinja2's immutable sandbox, with limits on time and size.

A template comes with a model file, so it is data from a stranger: it may loop forever or blow up. It runs in a sandbox
that gives it no way to change or reach anything, and is stopped when it takes too much time or space.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from bifolio.errors import ChatTemplateError

MAX_TEMPLATE_CHARS = 256 << 10
MAX_OUTPUT_CHARS = 4 << 20
MAX_SECONDS = 2.0
MAX_RANGE = 100_000
TICK = "bifolio_tick"  # names of the clock and of the bounded `~` inside a template
CONCAT = "bifolio_concat"

Message = Mapping[str, Any]


def render_chat(
    template: str | None,
    messages: Sequence[Message],
    *,
    special_tokens: Mapping[str, str] | None = None,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **variables: Any,
) -> str:
    """The text of a conversation, as the model was trained to read it."""
    if template is None:
        raise ChatTemplateError("this model has no chat template: use plain completion, or a chat model")
    if len(template) > MAX_TEMPLATE_CHARS:
        raise ChatTemplateError(f"the chat template has {len(template)} characters, more than any real one")
    check_messages(messages)
    import jinja2

    compiled = _compile(template)
    values = {
        **(special_tokens or {}),
        **variables,
        "messages": [dict(message) for message in messages],
        "add_generation_prompt": add_generation_prompt,
        "tools": list(tools) if tools else None,
    }
    try:
        return _bounded(compiled, values)
    except ChatTemplateError:
        raise
    except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise ChatTemplateError(f"the chat template refused the messages: {error}") from error


def check_messages(messages: Sequence[Message]) -> None:
    if not messages:
        raise ChatTemplateError("a chat needs at least one message, such as {'role': 'user', 'content': 'Hello'}")
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ChatTemplateError("every message needs a 'role' ('system', 'user', 'assistant' or 'tool')")
        if not isinstance(message.get("content"), str | list | type(None)):
            raise ChatTemplateError("the 'content' of a message must be text")


def _compile(template: str) -> Any:
    import jinja2
    import jinja2.ext
    from jinja2 import nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.visitor import NodeTransformer

    class BoundedEnvironment(ImmutableSandboxedEnvironment):
        """The sandbox, with a watch on operators that make large values out of small ones."""

        intercepted_binops = frozenset({"+", "*", "**"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if operator == "+":
                return _bounded_size(left + right)
            if operator == "*" and _size(left) * _size(right) <= MAX_OUTPUT_CHARS:
                return left * right
            raise ChatTemplateError(f"the chat template uses {operator!r} in a way that is not allowed")

    class Bounds(NodeTransformer):
        """Looks at the clock in every turn of every loop, and at the size of joined texts."""

        def visit_For(self, node: Any) -> Any:  # noqa: N802
            node.body.insert(0, nodes.ExprStmt(nodes.Call(nodes.Name(TICK, "load"), [], [], None, None)))
            return self.generic_visit(node)

        visit_Macro = visit_For  # noqa: N815

        def visit_Concat(self, node: Any) -> Any:  # noqa: N802
            parts = [self.visit(part) for part in node.nodes]
            return nodes.Call(nodes.Name(CONCAT, "load"), parts, [], None, None)

    environment = BoundedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise_exception, range=_bounded_range, strftime_now=lambda form: time.strftime(form)
    )
    try:
        tree = Bounds().visit(environment.parse(template))
        return jinja2.Template.from_code(environment, environment.compile(tree), environment.globals)
    except (jinja2.TemplateError, RecursionError) as error:
        raise ChatTemplateError(f"the chat template is broken: {error}") from error


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple) else int(abs(value))


def _bounded_size(value: Any) -> Any:
    if isinstance(value, str | list) and len(value) > MAX_OUTPUT_CHARS:
        raise ChatTemplateError(f"the chat template built a text of more than {MAX_OUTPUT_CHARS} characters")
    return value


def _concatenate(*parts: Any) -> str:
    return str(_bounded_size("".join(str(part) for part in parts)))


def _raise_exception(message: str) -> None:
    raise ChatTemplateError(f"the chat template refused the messages: {message}")


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _bounded_range(*bounds: int) -> range:
    numbers = range(*bounds)
    if len(numbers) > MAX_RANGE:
        raise ChatTemplateError(f"the chat template loops over {len(numbers)} numbers")
    return numbers


def _bounded(compiled: Any, values: dict[str, Any]) -> str:
    """Stop a template that writes or runs too long: looked at with every piece of output and every turn of a loop."""
    deadline = time.monotonic() + MAX_SECONDS

    def tick() -> None:
        if time.monotonic() > deadline:
            raise ChatTemplateError(f"the chat template ran longer than {MAX_SECONDS:g} seconds")

    pieces: list[str] = []
    size = 0
    for piece in compiled.generate({**values, TICK: tick, CONCAT: _concatenate}):
        pieces.append(piece)
        size += len(piece)
        if size > MAX_OUTPUT_CHARS:
            raise ChatTemplateError(f"the chat template wrote more than {MAX_OUTPUT_CHARS} characters")
        tick()
    return "".join(pieces)
