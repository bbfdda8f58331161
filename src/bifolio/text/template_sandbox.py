"""jinja2's immutable sandbox, in which operators, methods and filters are checked before they run.

Imports jinja2; `chat_template` imports this module when a template is rendered.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import wraps
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from bifolio.errors import ChatTemplateError
from bifolio.text.strict_json import write_json
from bifolio.text.template_limits import MAX_NUMBER, MAX_OUTPUT_CHARS, Limits

FORBIDDEN_METHODS = frozenset(  # of texts, numbers and bytes: they make large values, and no real template calls them
    {"translate", "maketrans", "to_bytes", "from_bytes", "expandtabs", "format_map", "encode", "decode"}
)
REMOVED_FILTERS = ("wordwrap", "urlize", "pprint", "xmlattr", "filesizeformat", "random", "forceescape")
COMPARISONS = ("eq", "==", "equalto", "ne", "!=", "gt", ">", "ge", ">=", "lt", "<", "le", "<=", "in", "greaterthan",
               "lessthan")  # fmt: skip
MAX_INDENT = 16


def compile_template(template: str, limits: Limits) -> jinja2.Template:
    """Compile a template whose loops, concatenations and comparisons observe the limits."""
    environment = BoundedEnvironment(limits)
    try:
        tree = Bounds().visit(environment.parse(template))
        return jinja2.Template.from_code(environment, environment.compile(tree), environment.globals)
    except (jinja2.TemplateError, SyntaxError, RecursionError, MemoryError, ValueError, TypeError) as error:
        raise ChatTemplateError(f"the chat template is broken: {error}") from error


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox, with checks on operations that expand small values into large ones."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, limits: Limits) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols], finalize=limits.allow_spelled
        )
        self._limits = limits
        self.tick = limits.tick  # attributes of the environment: a template cannot replace them
        self.bounded = limits.allow_spelled
        self._bound_filters()
        for name in COMPARISONS:
            self.tests[name] = _bounded_test(self.tests[name], limits)
        del self.globals["lipsum"]  # generates text of any length
        self.globals.update(
            raise_exception=lambda message: _raise_exception(limits.allow_spelled(message)),
            range=_bounded_range,
            strftime_now=lambda form: time.strftime(form),
        )

    def _bound_filters(self) -> None:
        self.filters["tojson"] = _to_json
        self.filters.update({name: _checked_filter(name, f, self._limits) for name, f in self.filters.items()})
        self.filters["join"] = self._join_filter
        for name in REMOVED_FILTERS:
            self.filters.pop(name, None)

    def concatenate(self, *parts: Any) -> str:
        return self._limits.join("", parts)

    def _join_filter(self, items: Any, separator: str = "", attribute: str | None = None) -> str:
        if attribute is not None:
            items = [self.getitem(item, attribute) for item in items]
        return self._limits.join(str(separator), items)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        limits = self._limits
        if operator == "+":
            return limits.count(left + right)
        if operator == "%":
            limits.check_call("%", (left, right) if isinstance(left, str) else ("",))
            return limits.count(left % right)
        if operator == "*" and _size(left) * _size(right) <= MAX_OUTPUT_CHARS:
            return limits.count(left * right)
        raise ChatTemplateError(f"the chat template uses {operator!r} in a way that is not allowed")

    def getitem(self, value: Any, argument: Any) -> Any:
        return super().getitem(value, self._limits.allow_spelled(argument))

    def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        limits = self._limits
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


def _size(value: Any) -> int:
    if isinstance(value, int | float):
        return int(min(abs(value), MAX_OUTPUT_CHARS + 1))
    return len(value)


def _raise_exception(message: str) -> None:
    raise ChatTemplateError(f"the chat template refused the messages: {message}")


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    if indent is not None and not (isinstance(indent, int) and 0 <= indent <= MAX_INDENT):
        raise ChatTemplateError(f"the chat template indents JSON by {indent!r}: at most {MAX_INDENT} are allowed")
    return write_json(value, indent=indent)


def _bounded_range(*bounds: int) -> range:
    numbers = range(*bounds)
    if len(numbers) > MAX_NUMBER:
        raise ChatTemplateError(f"the chat template loops over {len(numbers)} numbers")
    return numbers
