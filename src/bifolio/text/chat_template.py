"""Chat templates: rendered in jinja2's immutable sandbox, with limits on time and size.

A template comes with a model file and is untrusted: it may loop forever or build huge values. It runs in a sandbox
without access to anything outside, and is stopped when it exceeds its limits on time or memory. Operators, methods and
filters that can expand small values into large ones are checked *before* they run; the total size of all values that
a rendering builds is counted.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, ItemsView, Iterable, KeysView, Mapping, Sequence, ValuesView
from functools import wraps
from typing import Any

from bifolio.errors import ChatTemplateError

MAX_TEMPLATE_CHARS = 256 << 10
MAX_OUTPUT_CHARS = 4 << 20  # of one value, and of the whole text
MAX_BUILT_CHARS = 64 << 20  # of all values that one rendering builds
MAX_SECONDS = 2.0
MAX_NUMBER = 100_000  # loop iterations; widths, counts and indents
WIDE_FIELD = re.compile(r"%[^a-zA-Z%]*(\d{5}|\*)|\{[^}]*\d{5}|\{[^}]*\{")  # padding of 10,000 and more, or computed

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

    limits = Limits()
    compiled = _compile(template, limits)
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


def check_messages(messages: Sequence[Message]) -> None:
    if not messages:
        raise ChatTemplateError("a chat needs at least one message, such as {'role': 'user', 'content': 'Hello'}")
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ChatTemplateError("every message needs a 'role' ('system', 'user', 'assistant' or 'tool')")
        if not isinstance(message.get("content"), str | list | type(None)):
            raise ChatTemplateError("the 'content' of a message must be text")


class Limits:
    """Time and size limits of one rendering."""

    def __init__(self) -> None:
        self.deadline = time.monotonic() + MAX_SECONDS
        self.built = 0

    def tick(self) -> None:
        if time.monotonic() > self.deadline:
            raise ChatTemplateError(f"the chat template ran longer than {MAX_SECONDS:g} seconds")

    def count(self, value: Any) -> Any:
        """Add the size of a value to the total and return the value if it is within the limits."""
        if isinstance(value, str | list | tuple):
            self.allow(len(value))
            self.built += len(value) if isinstance(value, str) else ITEM_CHARS * len(value)
            if self.built > MAX_BUILT_CHARS:
                raise ChatTemplateError(f"the chat template built texts of more than {MAX_BUILT_CHARS} characters")
            self.tick()
        return value

    def allow(self, size: int) -> None:
        if size > MAX_OUTPUT_CHARS:
            raise ChatTemplateError(f"the chat template built a text of more than {MAX_OUTPUT_CHARS} characters")

    def allow_spelled(self, value: Any) -> Any:
        """Return the value if its string form is within the limits, including lists that repeat one long text."""
        size, left, turns = 0, [value], 0
        while left:
            item = left.pop()
            turns += 1
            if not turns % 4096:
                self.tick()
            if isinstance(item, Mapping):
                left.extend(item.keys())
                left.extend(item.values())
            elif isinstance(item, list | tuple | set | KeysView | ValuesView | ItemsView):
                left.extend(item)
            elif type(item).__name__ == "Namespace":  # of jinja2; it is spelled as the dict of its attributes
                left.append(object.__getattribute__(item, "_Namespace__attrs"))
            size += len(item) if isinstance(item, str) else 4
            self.allow(size)
        return value

    def check_call(self, name: str, arguments: Sequence[Any]) -> None:
        """Reject arguments that would build a large value; `arguments` begin with the object of a method."""
        for value in arguments:
            self.allow_spelled(value)
            if isinstance(value, int | float) and not -MAX_NUMBER <= value <= MAX_NUMBER and name in PADDING:
                raise ChatTemplateError(f"the chat template calls {name!r} with {value}, which is not allowed")
        if name in SPREADING and isinstance(arguments[0], str):
            self.allow(ITEM_CHARS * len(arguments[0]))
        if name in ("format", "format_map", "%") and WIDE_FIELD.search(re.sub(r"\{\{|\}\}", "", str(arguments[0]))):
            raise ChatTemplateError("the chat template uses format fields of a width that is not allowed")
        if name == "%":
            sizes = [len(str(value)) for value in _format_values(arguments[1])] if len(arguments) > 1 else []
            self.allow(len(str(arguments[0])) + str(arguments[0]).count("%") * max(sizes, default=0))
        if name == "replace" and len(arguments) >= 3:
            text, old, new = (str(value) for value in arguments[:3])
            self.allow(len(text) + text.count(old) * len(new))

    def join(self, separator: str, items: Iterable[Any]) -> str:
        pieces: list[str] = []
        size = 0
        for item in items:
            pieces.append(str(self.allow_spelled(item)))
            size += len(pieces[-1]) + len(separator)
            self.allow(size)
        return str(self.count(separator.join(pieces)))


FORBIDDEN_METHODS = frozenset(  # of texts, numbers and bytes: they make large values, and no real template calls them
    {"translate", "maketrans", "to_bytes", "from_bytes", "expandtabs", "format_map", "encode", "decode"}
)
REMOVED_FILTERS = ("wordwrap", "urlize", "pprint", "xmlattr", "filesizeformat", "random", "forceescape")
MAX_INDENT = 16
ITEM_CHARS = 16  # an item of a list counts as so many characters
SPREADING = {"list", "sort", "unique", "batch", "slice", "groupby"}  # filters that make a list of a text's characters
PADDING = {"center", "ljust", "rjust", "zfill", "expandtabs", "indent", "slice", "batch", "tojson", "wordwrap", "round"}


def _compile(template: str, limits: Limits) -> Any:
    import jinja2
    import jinja2.ext
    from jinja2 import nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.visitor import NodeTransformer

    class BoundedEnvironment(ImmutableSandboxedEnvironment):
        """The sandbox, with checks on operations that expand small values into large ones."""

        intercepted_binops = frozenset({"+", "*", "**", "%"})
        tick = staticmethod(limits.tick)  # attributes of the environment: a template cannot replace them
        concatenate = staticmethod(lambda *parts: limits.join("", parts))
        bounded = staticmethod(limits.allow_spelled)

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if operator == "+":
                return limits.count(left + right)
            if operator == "%":
                limits.check_call("%", (left, right) if isinstance(left, str) else ("",))
                return limits.count(left % right)
            if operator == "*" and _size(left) * _size(right) <= MAX_OUTPUT_CHARS:
                return limits.count(left * right)
            raise ChatTemplateError(f"the chat template uses {operator!r} in a way that is not allowed")

        def getitem(self, value: Any, argument: Any) -> Any:
            return super().getitem(value, limits.allow_spelled(argument))

        def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
            method = getattr(function, "__wrapped__", function)  # the sandbox wraps `format`
            owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
            if name in FORBIDDEN_METHODS:
                raise ChatTemplateError(f"the chat template calls {name!r}, which is not allowed")
            if isinstance(owner, str) and name == "join" and len(args) == 1:
                return limits.join(owner, args[0])
            if isinstance(owner, list | tuple | dict):
                limits.allow_spelled([owner, *args])  # index, count and others compare
            if isinstance(owner, str):
                limits.check_call(name, (owner, *args, *kwargs.values()))
            return limits.count(super().call(context, function, *args, **kwargs))

    class Bounds(NodeTransformer):
        """Inserts a time check into every loop iteration and a size check into every concatenation."""

        def visit_For(self, node: Any) -> Any:  # noqa: N802
            clock = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
            node.body.insert(0, nodes.ExprStmt(clock))
            return self.generic_visit(node)

        visit_Macro = visit_For  # noqa: N815

        def visit_Compare(self, node: Any) -> Any:  # noqa: N802
            """Nested lists that share their parts take exponential time to compare: their spelling is bounded first."""
            node = self.generic_visit(node)
            node.expr = self._bounded(node.expr)
            for operand in node.ops:
                operand.expr = self._bounded(operand.expr)
            return node

        def _bounded(self, value: Any) -> Any:
            if isinstance(value, nodes.Const):
                return value
            return nodes.Call(nodes.EnvironmentAttribute("bounded"), [value], [], None, None)

        def visit_Pair(self, node: Any) -> Any:  # noqa: N802
            """Nested tuples take exponential time to hash as well: keys are bounded before a dict is built."""
            node = self.generic_visit(node)
            node.key = self._bounded(node.key)
            return node

        def visit_Concat(self, node: Any) -> Any:  # noqa: N802
            parts = [self.visit(part) for part in node.nodes]
            return nodes.Call(nodes.EnvironmentAttribute("concatenate"), parts, [], None, None)

    def join_filter(items: Any, separator: str = "", attribute: str | None = None) -> str:
        if attribute is not None:
            items = [environment.getitem(item, attribute) for item in items]
        return limits.join(str(separator), items)

    environment = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols], finalize=limits.allow_spelled
    )
    environment.filters["tojson"] = _to_json
    environment.filters.update({name: _checked_filter(name, f, limits) for name, f in environment.filters.items()})
    environment.filters["join"] = join_filter
    for name in REMOVED_FILTERS:
        environment.filters.pop(name, None)
    for name in ("eq", "==", "equalto", "ne", "!=", "gt", ">", "ge", ">=", "lt", "<", "le", "<=", "in", "greaterthan",
                 "lessthan"):  # fmt: skip
        environment.tests[name] = _bounded_test(environment.tests[name], limits)
    del environment.globals["lipsum"]  # generates text of any length
    environment.globals.update(
        raise_exception=lambda message: _raise_exception(limits.allow_spelled(message)),
        range=_bounded_range,
        strftime_now=lambda form: time.strftime(form),
    )
    try:
        tree = Bounds().visit(environment.parse(template))
        return jinja2.Template.from_code(environment, environment.compile(tree), environment.globals)
    except (jinja2.TemplateError, SyntaxError, RecursionError, MemoryError, ValueError, TypeError) as error:
        raise ChatTemplateError(f"the chat template is broken: {error}") from error


def _bounded_test(function: Any, limits: Limits) -> Callable[..., Any]:
    """A comparison whose operands are of bounded size."""

    def test(*values: Any) -> Any:
        return function(*(limits.allow_spelled(value) for value in values))

    return test


def _checked_filter(name: str, function: Callable[..., Any], limits: Limits) -> Callable[..., Any]:
    """Wrap a filter so that its arguments and result are checked; jinja may pass its context as first argument."""
    skipped = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        limits.check_call(name, (*args[skipped:], *kwargs.values()))
        return limits.count(function(*args, **kwargs))

    return checked


def _format_values(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    return value if isinstance(value, tuple | list) else [value]


def _size(value: Any) -> int:
    if isinstance(value, int | float):
        return int(min(abs(value), MAX_OUTPUT_CHARS + 1))
    return len(value)


def _raise_exception(message: str) -> None:
    raise ChatTemplateError(f"the chat template refused the messages: {message}")


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    if indent is not None and not (isinstance(indent, int) and 0 <= indent <= MAX_INDENT):
        raise ChatTemplateError(f"the chat template indents JSON by {indent!r}: at most {MAX_INDENT} are allowed")
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _bounded_range(*bounds: int) -> range:
    numbers = range(*bounds)
    if len(numbers) > MAX_NUMBER:
        raise ChatTemplateError(f"the chat template loops over {len(numbers)} numbers")
    return numbers


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
