"""`/docs`: the operations of the server and the fields of their requests as a page without scripts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from html import escape
from typing import Any

import msgspec

from bifolio import __version__
from bifolio.serve.views.field_types import type_text
from bifolio.serve.views.openapi import OPERATIONS, PROTOCOL_OPERATIONS

# Operations that have no typed request: path, method, summary.
PLAIN_OPERATIONS = (
    ("/", "get", "The page: a playground and a live view of the cache"),
    ("/metrics", "get", "Prometheus metrics"),
    ("/live", "get", "Slots and blocks as server-sent events"),
    ("/openapi.json", "get", "The complete API as an OpenAPI document"),
    ("/docs", "get", "This page"),
)
PROTOCOL_NAMES = ("Anthropic", "ollama", "llama.cpp", "OpenAI")
HEAD = """<!doctype html><html lang="en" data-theme="auto"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">
<title>bifolio: API</title><link rel="icon" href="/page/icon.svg" type="image/svg+xml">
<link rel="stylesheet" href="/page/style.css"><link rel="stylesheet" href="/page/docs.css"></head><body>
<header id="top"><img class="logo" src="/page/icon.svg" alt="" width="26" height="26"><h1>bifolio API</h1>
<span class="muted">{version}</span><span class="grow"></span>
<a href="/">Page</a><a href="/openapi.json">openapi.json</a></header>"""


@cache
def docs_page() -> str:
    groups: dict[str, list[str]] = {}
    for path, method, summary, request, response in OPERATIONS:
        note = f"{summary}. Returns {response.__name__}."
        groups.setdefault("OpenAI and general", []).append(_operation(path, method, note, request))
    for path, method, summary in PLAIN_OPERATIONS:
        groups["OpenAI and general"].append(_operation(path, method, f"{summary}.", None))
    for path, method, summary, request in PROTOCOL_OPERATIONS:
        protocol = next((name for name in PROTOCOL_NAMES if f"({name})" in summary), "Other")
        heading = "OpenAI: stored responses" if protocol == "OpenAI" else protocol
        groups.setdefault(heading, []).append(_operation(path, method, f"{summary}.", request))
    links = "".join(f'<li><a href="#{_anchor(name)}">{escape(name)}</a></li>' for name in groups)
    body = "".join(
        f'<section><h2 id="{_anchor(name)}">{escape(name)}</h2>{"".join(parts)}</section>'
        for name, parts in groups.items()
    )
    head = HEAD.format(version=escape(__version__))
    return f'{head}<main class="docs"><nav aria-label="Protocols"><ul>{links}</ul></nav>{body}</main></body></html>'


def _anchor(name: str) -> str:
    return "".join(character if character.isalnum() else "-" for character in name.lower())


def _operation(path: str, method: str, note: str, request: Any) -> str:
    title = f'<span class="method {method}">{method.upper()}</span> <code>{escape(path)}</code>'
    if request is None:
        return f'<div class="operation"><p>{title}</p><p class="muted">{escape(note)}</p></div>'
    rows = "".join(_rows(request))
    return (
        f'<details class="operation"><summary>{title}<span class="muted"> {escape(note)}</span></summary>'
        f"<table><thead><tr><th>field</th><th>type</th><th>default</th></tr></thead><tbody>{rows}</tbody></table></details>"
    )


def _rows(request: Any) -> Iterator[str]:
    info = msgspec.inspect.type_info(request)
    if isinstance(info, msgspec.inspect.ListType):  # a body that is a list: the fields of its items
        info = info.item_type
    for field in info.fields:  # type: ignore[attr-defined]
        default = "required" if field.required else ""
        if not field.required and field.default not in (None, msgspec.NODEFAULT):
            default = json.dumps(field.default)
        cells = (f"<code>{escape(field.encode_name)}</code>", escape(type_text(field.type)), escape(default))
        yield "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
