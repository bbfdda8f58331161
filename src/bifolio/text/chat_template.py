"""Chat templates: rendered in jinja2's immutable sandbox, with limits on time and size.

A template comes with a model file and is untrusted: it may loop forever or build huge values. It runs in a sandbox
without access to anything outside, and is stopped when it exceeds its limits on time or memory. Operators, methods and
filters that can expand small values into large ones are checked *before* they run (`template_sandbox`); the total size
of all values that a rendering builds is counted (`template_limits`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bifolio.errors import ChatTemplateError
from bifolio.text.template_limits import Limits

MAX_TEMPLATE_CHARS = 256 << 10

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
    """Render a conversation with the model's chat template."""
    if template is None:
        raise ChatTemplateError("this model has no chat template: use plain completion, or a chat model")
    if len(template) > MAX_TEMPLATE_CHARS:
        raise ChatTemplateError(
            f"the chat template has {len(template)} characters, more than the {MAX_TEMPLATE_CHARS} allowed"
        )
    check_messages(messages)
    import jinja2

    from bifolio.text.template_sandbox import compile_template

    limits = Limits()
    compiled = compile_template(template, limits)
    values = {
        **(special_tokens or {}),
        **variables,
        "messages": [dict(message) for message in messages],
        "add_generation_prompt": add_generation_prompt,
        "tools": list(tools) if tools else None,
    }
    try:
        return _write(compiled, values, limits)
    except ChatTemplateError:
        raise
    except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError, RecursionError,
            MemoryError) as error:  # fmt: skip
        raise ChatTemplateError(f"the chat template refused the messages: {error}") from error


def check_takes_tools(template: str) -> None:
    """Refuse tools that the template would drop: the model would answer without having seen them."""
    if "tools" not in template:
        raise ChatTemplateError(
            "tools: this model's chat template has no place for them: leave tools out, or choose a model that calls "
            "tools"
        )


def check_messages(messages: Sequence[Message]) -> None:
    if not messages:
        raise ChatTemplateError("a chat needs at least one message, such as {'role': 'user', 'content': 'Hello'}")
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ChatTemplateError("every message needs a 'role' ('system', 'user', 'assistant' or 'tool')")
        if not isinstance(message.get("content"), str | list | type(None)):
            raise ChatTemplateError("the 'content' of a message must be text")


def _write(compiled: Any, values: dict[str, Any], limits: Limits) -> str:
    """Render the template; the limits on time and size are checked with every piece of output."""
    pieces: list[str] = []
    size = 0
    for piece in compiled.generate(values):
        pieces.append(piece)
        size += len(piece)
        limits.allow(size)
        limits.tick()
    return "".join(pieces)
