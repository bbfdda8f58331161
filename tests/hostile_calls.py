"""Calls of `get_weather` whose arguments Python reads and strict JSON readers refuse, in every format of tool calls."""

from __future__ import annotations

import json
from typing import Any

_JSON = r'{"city": "a\ud800", "days": 1e999, "tags": [NaN, "\udc00", "\ud83d\ude00"]}'
_FOUND = {"city": "a\ufffd", "days": None, "tags": [None, "\ufffd", "😀"]}
_TEXT = "a\\ud800"  # a format without escapes keeps the letters
ANSWERS: dict[str, tuple[str, dict[str, Any]]] = {
    "hermes": (f'<tool_call>{{"name": "get_weather", "arguments": {_JSON}}}</tool_call>', _FOUND),
    "granite": (f'<|tool_call|>[{{"name": "get_weather", "arguments": {_JSON}}}]', _FOUND),
    "phi": (f'functools[{{"arguments": {_JSON}, "name": "get_weather"}}]', _FOUND),
    "llama3": (f'{{"name": "get_weather", "parameters": {json.dumps(_JSON)}}}', _FOUND),
    "mistral": (f"[TOOL_CALLS]get_weather[ARGS]{_JSON}", _FOUND),
    "deepseek": (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{_JSON}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        _FOUND,
    ),
    "kimi": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        f"{_JSON}<|tool_call_end|><|tool_calls_section_end|>",
        _FOUND,
    ),
    "harmony": (f"<|channel|>commentary to=functions.get_weather<|message|>{_JSON}<|call|>", _FOUND),
    "pythonic": (
        r"[get_weather(city='a\ud800', days=1e999, tags=[-1e999, '\udc00', '\ud83d\ude00'])]",
        _FOUND,
    ),
    "gemma": (
        r'<|tool_call>call:get_weather{city:"a\ud800",days:1e999,tags:[-1e999,"\udc00",<|"|>\ud800<|"|>]}<tool_call|>',
        {"city": "a\ufffd", "days": None, "tags": [None, "\ufffd", "\\ud800"]},
    ),
    "glm": (
        f"<tool_call>get_weather<arg_key>city</arg_key><arg_value>{_TEXT}</arg_value><arg_key>days</arg_key>"
        '<arg_value>1e999</arg_value><arg_key>tags</arg_key><arg_value>["\\udc00", -1e999]</arg_value></tool_call>',
        {"city": _TEXT, "days": None, "tags": ["\ufffd", None]},
    ),
    "qwen3_coder": (
        f"<tool_call><function=get_weather><parameter=city>{_TEXT}</parameter><parameter=days>NaN</parameter>"
        '<parameter=tags>["\\udc00", -1e999]</parameter></function></tool_call>',
        {"city": _TEXT, "days": "NaN", "tags": ["\ufffd", None]},
    ),
}  # fmt: skip
