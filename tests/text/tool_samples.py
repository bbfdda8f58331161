"""Answers with tool calls, written as the published templates and model cards of each family show them."""

from __future__ import annotations

from typing import NamedTuple

from bifolio.text.tools.events import ToolSpec

TOOLS = {
    "get_weather": ToolSpec(
        "get_weather",
        {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "tags": {"type": "array"}},
            "required": ["city"],
        },
    ),
    "now": ToolSpec("now"),
    "write": ToolSpec("write", {"type": "object", "properties": {"text": {"type": "string"}}}),
}
Calls = list[tuple[str, object]]
ROME: tuple[str, object] = ("get_weather", {"city": "Rome", "days": 2})
OSLO: tuple[str, object] = ("get_weather", {"city": "Osló ☃"})
NOW: tuple[str, object] = ("now", {})
CODE = 'def f(a):\n    return {"x": [a]}  # "quoted" </b>'


class Sample(NamedTuple):
    """An answer and its parts."""

    text: str
    calls: Calls
    content: str = ""
    reasoning: str = ""


SAMPLES: dict[str, list[Sample]] = {
    "hermes": [
        Sample('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>', [ROME]),
        Sample(
            'Let me look.\n\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Osló ☃"}}\n</tool_call>\n'
            '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
            [OSLO, NOW],
            "Let me look.",
        ),
        Sample('<tool_call>{"arguments": {"city": "Rome", "days": 2}, "name": "get_weather"}</tool_call>', [ROME]),
        Sample('<tool_call>{"name": "now"}</tool_call> Done.', [NOW], " Done."),
        Sample('<tool_call>{"name": "now", "arguments": "{}"}</tool_call>', [NOW]),
    ],
    "hermes_unmarked": [  # answers of Qwen2.5-Coder
        Sample(
            '```json\n{\n  "name": "get_weather",\n  "arguments": {\n    "city": "Rome",\n    "days": 2\n  }\n}\n```',
            [ROME],
        ),
        Sample('```json\n{"name": "get_weather", "arguments": {"city": "Osló ☃"}}\n```\n', [OSLO]),
        Sample(
            'To find out, I look.\n\n```json\n{"name": "now", "arguments": {}}\n{"name": "get_weather", "arguments": '
            '{"city": "Rome", "days": 2}}\n```\n\nDone.',
            [NOW, ROME],
            "To find out, I look.\n\nDone.",
        ),
        Sample('  ```json\n[{"name": "now", "arguments": {}}, {"name": "now", "arguments": {}}]\n```', [NOW, NOW]),
        Sample('{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}', [ROME]),
        Sample('{"name": "now", "arguments": {}}\n{"name": "now", "arguments": {}}\n', [NOW, NOW]),
        Sample('```json\n{"name": "now", "arguments": {}}', [NOW]),  # the answer ends before the fence
        Sample(
            '```json\n{"name": "write", "arguments": {"text": "# Title\\n```sh\\nls\\n```\\n"}}\n```',
            [("write", {"text": "# Title\n```sh\nls\n```\n"})],
        ),
        Sample(
            '```json\n{"name": "now", "arguments": {}}\n```\n<tool_call>\n{"name": "now"}\n</tool_call>',
            [NOW, NOW],
        ),
    ],
    "qwen3_coder": [
        Sample(
            "I will look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n"
            "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
            [ROME, NOW],
            "I will look.",
        ),
        Sample(
            f"<tool_call>\n<function=write>\n<parameter=text>\n{CODE}\n</parameter>\n</function>\n</tool_call>",
            [("write", {"text": CODE})],
        ),
    ],
    "llama3": [
        Sample('{"name": "get_weather", "parameters": {"city": "Rome", "days": 2}}', [ROME]),
        Sample('<|python_tag|>{"name": "now", "parameters": {}}; {"name": "get_weather", "parameters": '
               '{"city": "Osló ☃"}}', [NOW, OSLO]),
    ],
    "pythonic": [
        Sample('[get_weather(city="Rome", days=2), now()]', [ROME, NOW]),
        Sample(
            "[get_weather(city='O\\'Hare', tags=['a', (1, 2.5), {'k': None}, True,])]",
            [("get_weather", {"city": "O'Hare", "tags": ["a", [1, 2.5], {"k": None}, True]})],
        ),
    ],
    "mistral": [
        Sample('[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}, '
               '{"name": "now", "arguments": {}, "id": "abc123def"}]', [ROME, NOW]),
        Sample('One moment.[TOOL_CALLS]get_weather[ARGS]{"city": "Rome", "days": 2}[TOOL_CALLS]now[ARGS]{}',
               [ROME, NOW], "One moment."),
        Sample('[TOOL_CALLS]now[CALL_ID]a1b2c3d4e[ARGS]{}', [NOW]),
    ],
    "deepseek": [
        Sample(
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{"city": "Rome", '
            '"days": 2}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```'
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            [ROME, NOW],
        ),
        Sample(
            'I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Rome", "days": 2}'
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            [ROME],
            "I look.",
        ),
    ],
    "kimi": [
        Sample(
            '<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>'
            '{"city": "Rome", "days": 2}<|tool_call_end|><|tool_calls_section_end|>',
            [ROME],
        ),
        Sample(
            'I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>'
            '{"city": "Osló ☃"}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}'
            "<|tool_call_end|><|tool_calls_section_end|>",
            [OSLO, NOW],
            "I look.",
        ),
    ],
    "gemma": [
        Sample('<|tool_call>call:get_weather{city:<|"|>Rome<|"|>,days:2}<tool_call|><|tool_call>call:now{}<tool_call|>',
               [ROME, NOW]),
        Sample('Let me look.<|tool_call>call:get_weather{city:<|"|>Osló ☃<|"|>}<tool_call|>', [OSLO], "Let me look."),
        Sample(f'<|tool_call>call:write{{text:<|"|>{CODE}<|"|>}}<tool_call|>', [("write", {"text": CODE})]),
        Sample(
            '<|tool_call>call:get_weather{ city: <|"|>}, a:<|"|>, '
            'tags:[<|"|>a,b<|"|>,{k:None,<|"|>q r<|"|>:[true,-2.5],s t:1},"c"]}<tool_call|>',
            [("get_weather", {"city": "}, a:", "tags": ["a,b", {"k": None, "q r": [True, -2.5], "s t": 1}, "c"]})],
        ),
    ],
    "glm": [
        Sample(
            "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n<arg_key>days</arg_key>\n"
            "<arg_value>2</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
            [ROME, NOW],
        ),
        Sample(
            f"Sure.\n<tool_call>write<arg_key>text</arg_key><arg_value>{CODE}</arg_value></tool_call>",
            [("write", {"text": CODE})],
            "Sure.",
        ),
    ],
    "harmony": [
        Sample(
            "<|channel|>analysis<|message|>Need the weather.<|end|><|start|>assistant<|channel|>commentary "
            'to=functions.get_weather <|constrain|>json<|message|>{"city": "Rome", "days": 2}<|call|>',
            [ROME],
            reasoning="Need the weather.",
        ),
        Sample(
            "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>It is 5 < 6.",
            [],
            "It is 5 < 6.",
            "Easy.",
        ),
        Sample(
            "<|channel|>commentary<|message|>I check.<|end|><|start|>assistant to=functions.now<|channel|>commentary"
            "<|message|>{}",
            [NOW],
            "I check.",
        ),
    ],
    "granite": [
        Sample('<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}, {"name": "now", '
               '"arguments": {}}]', [ROME, NOW]),
        Sample('<tool_call>[{"name": "now", "arguments": {}}]', [NOW]),
    ],
    "phi": [
        Sample('<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}]<|/tool_call|>',
               [ROME]),
        Sample('functools[{"name": "now", "arguments": {}}]', [NOW]),
    ],
}  # fmt: skip

MALFORMED: dict[str, list[str]] = {
    "hermes": [
        '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "now", "arguments": {}</tool_call>',
        '<tool_call>{"name": "now", "arguments": {"a": }}</tool_call>',
        '<tool_call>{"name": "now", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "now"} and more</tool_call>',
        "<tool_call>\nno json\n</tool_call> and <tool_",
        "<tool_call>" * 100 + "x",
        '<tool_call>{"name": "' + "x" * 2000,
    ],
    "hermes_unmarked": [
        '```json\n{"name": "other", "arguments": {}}\n```',
        '```json\n{"name": "now"}\n```',
        '```json\n{"name": "now", "arguments": null}\n```',
        '```json\n{"name": "now", "arguments": "{}"}\n```',
        '```json\n{"name": "now", "arguments": [1]}\n```',
        '```json\n{"name": "now", "parameters": {}}\n```',
        '```json\n{"name": "now", "arguments": {}, "description": "The time"}\n```',
        '```json\n{"name": "now", "arguments": {}}\n{"name": "other", "arguments": {}}\n```',
        '```json\n{"name": "now", "arguments": {}}\nand more\n```',
        '```json\n{"name": "now", "arguments": {"a": }}\n```',
        '```json\n{"city": "Rome"}\n```\n\nThat is all.',
        '```json\n[]\n```',
        "```json",
        "```",
        '```jsonc\n{"name": "now", "arguments": {}}\n```',
        '```python\nnow()\n```\n',
        'Write ```json\n{"name": "now", "arguments": {}}\n``` there.',
        '````json\n{"name": "now", "arguments": {}}\n````',
        'Like {"name": "now", "arguments": {}}',
        '{"city": "Rome", "days": 2}',
        '[{"name": "now", "arguments": {}}',
        '[1, 2]',
    ],
    "qwen3_coder": [
        "<tool_call>\n<function=other>\n</function>\n</tool_call>",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</function>\n</tool_call>",
        "<tool_call>\n<function=get_weather>\n<parameter=city>Rome",
        "<tool_call>plain</tool_call>",
    ],
    "llama3": ['{"name": "other"}', '{"city": "Rome"}', '{"name": "now", "parameters": {', "{", "[1]"],
    "pythonic": ["[other(a=1)]", "[now(", "[1, 2, 3]", "[now(a=b)]", "[now(a=1]", "[link](http://x)", "[now()"],
    "mistral": [
        '[TOOL_CALLS][{"name": "other", "arguments": {}}]', "[TOOL_CALLS]now{}", '[TOOL_CALLS][{"name": "now"}',
        "[TOOL_CALLS]now[ARGS]5", "[TOOL_CALLS]other[ARGS]{}", "[TOOL_", "[TOOL_CALLS]now[ARGS]{",
    ],
    "deepseek": [
        "<｜tool▁calls▁begin｜>oops<｜tool▁calls▁end｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>other<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}",
    ],
    "kimi": [
        "<|tool_calls_section_begin|>oops<|tool_calls_section_end|>",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.other:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>5<|tool_call_end|>",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}",
    ],
    "gemma": [
        "<|tool_call>call:other{}<tool_call|>",
        "<|tool_call>now{}<tool_call|>",
        "<|tool_call>call:now<tool_call|>",
        "<|tool_call>call:get_weather{city:Rome}<tool_call|>",
        '<|tool_call>call:get_weather{city:<|"|>Rome}<tool_call|>',
        '<|tool_call>call:get_weather{city:<|"|>Rome<|"|>,city:1}<tool_call|>',
        "<|tool_call>call:get_weather{tags:[1,}<tool_call|>",
        "<|tool_call>call:get_weather{tags:[1]]}<tool_call|>",
        "<|tool_call>call:now{} and more<tool_call|>",
        "<|tool_call>call:get_weather{days:2",
    ],
    "glm": [
        "<tool_call>other\n</tool_call>",
        "<tool_call>get_weather<arg_key>city</arg_key>Rome</tool_call>",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Rome",
    ],
    "harmony": [
        "<|channel|>commentary to=functions.other<|message|>{}<|call|>",
        "<|channel|>commentary to=functions.now<|message|>{<|call|>",
        "<|channel|>commentary to=functions.now",
    ],
    "granite": ['<|tool_call|>[{"name": "other", "arguments": {}}]', "<|tool_call|>x", "<|tool_call|>[]"],
    "phi": ['functools[{"name": "other"}]', "functools", "<|tool_call|>[<|/tool_call|>", "functools are great"],
}  # fmt: skip
