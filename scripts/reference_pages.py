"""The pages of docs/reference: one row for each option, argument and field, from the code that reads them.

    python scripts/reference_pages.py            # writes docs/reference/*.md

Options come from the parsers of the command line, fields of requests from the types that the server decodes, arguments
of Python from signatures and dataclasses. Meanings are help texts and comments of the code; docs/data/fields.json has
those that the code has no words for. A test compares the pages with the code.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import enum
import inspect
import json
import os
import re
import textwrap
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from bifolio import BeamSearchParams, SamplingParams, SpeculativeConfig, StructuredOutputsParams
from bifolio.api.llm import LLM
from bifolio.cli.commands import DEST_PREFIX, App, Command
from bifolio.cli.main import HEADINGS, build_app
from bifolio.cli.option_values import OptionValues
from bifolio.serve.protocols import anthropic_types, llama_cpp_types, ollama_types, responses_types
from bifolio.serve.protocols import openai_types as p
from bifolio.serve.views.field_types import type_text
from bifolio.serve.views.openapi import OPERATIONS, PROTOCOL_OPERATIONS

DOCS = Path(__file__).resolve().parents[1] / "docs"
MEANINGS = DOCS / "data" / "fields.json"
NOTE = "<!-- scripts/reference_pages.py writes this page -->"
COMMAND_LINE = """\
Every verb with all of its options; [the command line](../command-line.md) is the guide. An option `--kv-dtype` is also
the variable `BIFOLIO_KV_DTYPE` and the line `kv_dtype = ...` of the [configuration file](../command-line.md#settings).
`bifolio VERB --help-all` prints the same."""
REQUESTS = """\
Every field that the server reads, with its type, bounds and default; [the server](../server.md) is the guide. Of a
running server, `GET /openapi.json` is the same as a document for programs, and `GET /docs` as a page. A field that is
not here is refused by name. Where no default is shown, it is null: off, or the model's sampling default."""
DEFAULT_NOTE = re.compile(r" \[default: .*\]$", re.DOTALL)
KINDS = {"int": "integer", "float": "number", "Path": "path"}
PROMPTS = "text, token ids, or a list of up to 256 of them"  # simpler than its type
SHARED = ("CompletionRequest", "ChatRequest")  # both have the fields of `Generation`
NESTED = (
    p.StreamOptions,
    p.ResponseFormat,
    p.JsonSchemaFormat,
    p.StructuredOutputs,
    p.BeamSearch,
    p.Message,
    p.ToolCall,
    p.FunctionCall,
    p.Tool,
    p.FunctionDefinition,
)


def pages() -> dict[Path, str]:
    """The content of every page."""
    folder = DOCS / "reference"
    return {
        folder / "command-line.md": command_line_page(),
        folder / "requests.md": requests_page(),
        folder / "python.md": python_page(),
    }


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *("| " + " | ".join(row) + " |" for row in rows)]


def code(text: str) -> str:
    return f"`{text}`" if text else ""


def cell(text: str) -> str:
    """Text that fits into a table: one line, bars escaped."""
    return " ".join(text.split()).replace("|", "\\|")


# -- the command line ------------------------------------------------------------------------------------------------


def command_line_page() -> str:
    for name in [name for name in os.environ if name.startswith("BIFOLIO_")] + ["OPENAI_API_KEY", "RAY_ADDRESS"]:
        os.environ.pop(name, None)  # defaults of the program, not of this shell
    lines = [
        NOTE,
        "# Options of the command line",
        "",
        COMMAND_LINE,
        "",
    ]
    verbs = dict(all_verbs(build_app()))
    for heading, names in HEADINGS.items():
        own = [name for name in verbs if name.split()[1] in names]
        lines += [f"- **{heading}**: " + ", ".join(f"[{name}](#{name.replace(' ', '-')})" for name in own)]
    for name, command in verbs.items():
        lines += ["", f"## {name}", "", *verb_section(name, command)]
    return "\n".join(lines) + "\n"


def all_verbs(app: App, program: str = "bifolio") -> Iterator[tuple[str, Command]]:
    for verb, entry in app.verbs.items():
        if isinstance(entry, App):
            yield from all_verbs(entry, f"{program} {verb}")
        else:
            yield f"{program} {verb}", entry


def verb_section(program: str, command: Command) -> list[str]:
    parser = command.parser(program, OptionValues(program, {}, {}), in_full=True)
    lines = [cell(command.help.split("\n\n")[0]), "", code(str(parser.usage))]
    for group in parser._action_groups:
        actions = [action for action in group._group_actions if action.dest.startswith(DEST_PREFIX)]
        if not actions:
            continue
        rows = [option_row(action) for action in actions]
        title = "argument" if all(not action.option_strings for action in actions) else "option"
        if group.title not in ("options", "positional arguments"):
            title = f"option: {group.title}"
        lines += ["", *table((title, "value", "default", "meaning"), rows)]
    return lines


def option_row(action: argparse.Action) -> tuple[str, str, str, str]:
    names = ", ".join(code(name) for name in action.option_strings) or code(str(action.metavar))
    takes_value = action.nargs != 0 and not isinstance(action, argparse.BooleanOptionalAction)
    value = KINDS.get(getattr(action.type, "__name__", "str"), "text") if takes_value else "switch"
    default = "" if action.default in (None, False, [], "") else code(cell(str(action.default)))
    if action.required and action.option_strings:
        default = "required"
    return names, value, default, cell(DEFAULT_NOTE.sub("", (action.help or "").replace("%%", "%")))


# -- requests of the server ------------------------------------------------------------------------------------------


def requests_page() -> str:
    lines = [
        NOTE,
        "# Fields of requests",
        "",
        REQUESTS,
        "",
        "## Fields of completions and chat",
        "",
        "`POST /v1/completions` and `POST /v1/chat/completions` share these:",
        "",
        *field_table(p.Generation),
    ]
    for path, method, summary, request, _ in OPERATIONS:
        if request is not None:
            left_out = {field.name for field in msgspec.structs.fields(p.Generation)} if is_shared(request) else set()
            lines += ["", f"## {method.upper()} {path}", "", f"{summary}."]
            if left_out:
                lines[-1] += " With the [shared fields](#fields-of-completions-and-chat) and:"
            lines += ["", *field_table(request, left_out)]
    lines += ["", "## Parts of requests"]
    for kind in NESTED:
        lines += ["", f"### {kind.__name__}", "", *field_table(kind)]
    lines += [
        "",
        "## Other protocols",
        "",
        "Fields have the meanings of their protocol ([notes](../server.md#other-protocols)).",
    ]
    for path, method, summary, request in PROTOCOL_OPERATIONS:
        if request is not None:
            fields = field_table(request, other=True)
            lines += ["", f"### {method.upper()} {path}", "", f"{summary}{items_of(request)}.", "", *fields]
    return "\n".join(lines) + "\n"


def items_of(request: Any) -> str:
    is_list = isinstance(msgspec.inspect.type_info(request), msgspec.inspect.ListType)
    return "; a list of" if is_list else ""


def is_shared(request: type) -> bool:
    return request.__name__ in SHARED


def field_table(kind: Any, left_out: set[str] = frozenset(), other: bool = False) -> list[str]:  # type: ignore[assignment]
    rows = []
    info = msgspec.inspect.type_info(kind)
    if isinstance(info, msgspec.inspect.ListType):  # a body that is a list: the fields of its items
        info = info.item_type
        kind = info.cls  # type: ignore[union-attr]
    for field in info.fields:  # type: ignore[union-attr]
        if field.name in left_out:
            continue
        default = "required" if field.required else _shown_default(field.default)
        meaning = meaning_of(kind, field.name, required=not other)
        is_prompts = kind.__annotations__.get(field.name) == "Prompts"
        row = [code(field.encode_name), PROMPTS if is_prompts else cell(_type(field.type)), default]
        rows.append(row if other else [*row, meaning])
    head = ("field", "type", "default", "meaning")
    return table(head[:3] if other else head, rows)


def _shown_default(value: Any) -> str:
    if value is msgspec.NODEFAULT or value is None:
        return ""
    return code(json.dumps(value))


def _type(kind: Any) -> str:
    known = {nested.__name__ for nested in NESTED}
    return type_text(kind, lambda name: f"[{name}](#{name.lower()})" if name in known else f"object ({name})", code)


# -- Python ----------------------------------------------------------------------------------------------------------


def python_page() -> str:
    lines = [
        NOTE,
        "# Arguments of Python classes",
        "",
        "[From Python](../python.md) is the guide, [classes](../api.md) has the methods.",
        "",
        "## LLM",
        "",
        "`LLM(model, **options)` and `AsyncLLM(model, **options)`:",
        "",
    ]
    rows = [
        [code(argument.name), _python_default(argument.default), meaning_of(LLM, argument.name)]
        for argument in inspect.signature(LLM.__init__).parameters.values()
        if argument.name not in ("self", "ported")
    ]
    lines += table(("argument", "default", "meaning"), rows)
    for kind in (SamplingParams, BeamSearchParams, StructuredOutputsParams, SpeculativeConfig):
        lines += ["", f"## {kind.__name__}", "", cell((inspect.getdoc(kind) or "").split("\n\n")[0]), ""]
        rows = [
            [code(field.name), _python_default(field.default), meaning_of(kind, field.name)]
            for field in dataclasses.fields(kind)
            if field.init
        ]
        lines += table(("field", "default", "meaning"), rows)
    return "\n".join(lines) + "\n"


def _python_default(value: Any) -> str:
    if value in (inspect.Parameter.empty, dataclasses.MISSING):
        return "required"
    if callable(value):
        return ""
    if isinstance(value, enum.Enum):
        return code(f"{type(value).__name__}.{value.name}")
    return code(cell(repr(value)))


# -- meanings --------------------------------------------------------------------------------------------------------

IGNORED = p.IGNORED | anthropic_types.IGNORED | llama_cpp_types.IGNORED | ollama_types.IGNORED | responses_types.IGNORED


class MissingMeaningError(LookupError):
    """A field that neither the code nor docs/data/fields.json explains."""


@cache
def written_meanings() -> dict[str, str]:
    found: dict[str, str] = json.loads(MEANINGS.read_text(encoding="utf-8"))
    return found


def meaning_of(kind: Any, name: str, required: bool = True) -> str:
    """By class and field, else the comment of the class, else by field alone, else that of SamplingParams."""
    written = written_meanings()
    reasons = (fields[name] for owner, fields in IGNORED.items() if issubclass(kind, owner) and name in fields)
    reason = next(reasons, None)
    found = (
        (reason and f"accepted and ignored: {reason}")
        or written.get(f"{kind.__name__}.{name}")
        or comments_of(kind).get(name)
        or written.get(name)
        or comments_of(SamplingParams).get(name)
    )
    if found is None and required:
        raise MissingMeaningError(f"add the meaning of {kind.__name__}.{name} to docs/data/fields.json")
    return cell(found or "")


@cache
def comments_of(kind: Any) -> dict[str, str]:
    """Comments at the ends of the lines on which fields are declared, those of base classes included."""
    found: dict[str, str] = {}
    for owner in reversed(kind.__mro__):
        if owner.__module__.startswith("bifolio"):
            source = textwrap.dedent(inspect.getsource(owner))
            lines = source.splitlines()
            body = ast.parse(source).body[0].body  # type: ignore[attr-defined]
            for node in body:
                if (
                    isinstance(node, ast.AnnAssign)
                    and node.end_lineno is not None
                    and isinstance(node.target, ast.Name)
                ):
                    after = lines[node.end_lineno - 1].encode()[node.end_col_offset :].decode()
                    if after.strip().startswith("#"):
                        found[node.target.id] = after.strip().removeprefix("#").strip()
    return found


def main() -> None:
    for path, text in pages().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(DOCS.parent), len(text.splitlines()))


if __name__ == "__main__":
    main()
