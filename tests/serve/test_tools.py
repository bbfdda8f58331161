"""Tool calls and reasoning over HTTP, with a vocabulary whose marks are special tokens and a template that reasons."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from serving import RunningServer, running_server

from helpers import tiny_folder

TEMPLATE = (
    "{% for m in messages %}<|user|>{{ m.content }}{{ m.reasoning_content }}\n{% endfor %}"
    "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}"
    "{% endif %}"
)
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"],
        "additionalProperties": False}  # fmt: skip
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": True}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {},
                                                                    "additionalProperties": False}}},
]  # fmt: skip
THINK_END = 320 + 5  # the sixth token that the fixture adds
MESSAGES: list[Any] = [{"role": "user", "content": "Hello <think>"}]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    import tokenizers

    folder = tiny_folder(tokenizer=True, chat_template=TEMPLATE, max_position_embeddings=1024)
    path = folder / "tokenizer.json"
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens(["<tool_call>", "</tool_call>", "<|user|>", "<|assistant|>"])
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.save(str(path))
    config = {"vocab_size": tokenizer.get_vocab_size(), "bos_token_id": 0, "eos_token_id": 0}
    tiny_folder(folder.parent / f"{folder.name}-wide", max_position_embeddings=1024, **config)
    wide = folder.parent / f"{folder.name}-wide"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (wide / name).write_text((folder / name).read_text())
    with running_server(engine={"model": str(wide)}) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return server.client()


def ask(client: openai.OpenAI, **options: Any) -> Any:
    body = {"thinking_budget": 6, **options.pop("extra_body", {})}
    return client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=120, seed=options.pop("seed", 1), extra_body=body, **options
    )


@pytest.mark.full
def test_reasoning_is_limited_and_separated(client: openai.OpenAI) -> None:
    answer = ask(client, extra_body={"return_token_ids": True}, logit_bias={"0": -100})
    message = answer.choices[0].message
    assert message.reasoning_content
    assert "</think>" not in message.reasoning_content
    closing = answer.choices[0].token_ids.index(THINK_END)
    assert closing <= 6  # a budget of six tokens
    joined = ask(client, extra_body={"separate_reasoning": False}, logit_bias={"0": -100}).choices[0].message
    assert joined.content.partition("</think>")[0].strip() == message.reasoning_content
    assert not hasattr(joined, "reasoning_content")


@pytest.mark.full
def test_streamed_reasoning_and_calls_equal_the_whole(client: openai.OpenAI) -> None:
    for seed in range(3):
        options: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
        whole = ask(client, seed=seed, **options).choices[0]
        chunks = [chunk.choices[0] for chunk in ask(client, seed=seed, stream=True, **options)]
        reasoning = "".join(getattr(chunk.delta, "reasoning_content", None) or "" for chunk in chunks)
        calls = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
        assert whole.finish_reason == chunks[-1].finish_reason == "tool_calls"
        assert reasoning == whole.message.reasoning_content
        assert whole.message.content is None
        (call,) = whole.message.tool_calls
        assert calls[0].function.name == call.function.name
        arguments = "".join(part.function.arguments or "" for part in calls)
        assert arguments == call.function.arguments
        assert json.loads(arguments).keys() <= {"city"}


@pytest.mark.full
def test_strict_tools_leave_text_free(client: openai.OpenAI) -> None:
    answer = ask(client, tools=TOOLS, extra_body={"reasoning_effort": "none", "thinking_budget": None})
    choice = answer.choices[0]
    assert choice.message.content or choice.message.tool_calls
    assert not hasattr(choice.message, "reasoning_content")


@pytest.mark.full
def test_a_call_in_a_block_of_json_is_a_call(client: openai.OpenAI) -> None:
    """As Qwen2.5-Coder writes it, whatever the template says."""
    loose = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]
    options: dict[str, Any] = {"tools": loose, "extra_body": {"reasoning_effort": "none", "thinking_budget": None}}
    text = '```json\n{\n  "name": "weather",\n  "arguments": {\n    "city": "Rome"\n  }\n}\n```'
    for written, is_call in ((text, True), (text.replace("weather", "stocks"), False)):
        options["extra_body"]["structured_outputs"] = {"choice": [written]}
        whole = ask(client, **options).choices[0]
        chunks = [chunk.choices[0] for chunk in ask(client, stream=True, **options)]
        calls = [call.function for chunk in chunks for call in chunk.delta.tool_calls or []]
        content = "".join(chunk.delta.content or "" for chunk in chunks)
        assert whole.finish_reason == chunks[-1].finish_reason == ("tool_calls" if is_call else "stop")
        assert [call.function.name for call in whole.message.tool_calls or []] == (["weather"] if is_call else [])
        assert [call.name for call in calls if call.name] == (["weather"] if is_call else [])
        assert (whole.message.content or "") == content == ("" if is_call else written)
        if is_call:
            assert json.loads("".join(call.arguments or "" for call in calls)) == {"city": "Rome"}


@pytest.mark.full
def test_one_call_where_parallel_calls_are_off(client: openai.OpenAI) -> None:
    loose = [{"type": "function", "function": {"name": "now"}}]
    call = '```json\n{"name": "now", "arguments": {}}\n```\n'
    body: dict[str, Any] = {"reasoning_effort": "none", "thinking_budget": None}
    body["structured_outputs"] = {"choice": [f"One.\n{call}{call}Two."]}
    options: dict[str, Any] = {"tools": loose, "extra_body": body}
    for many, count in ((True, 2), (False, 1)):
        message = ask(client, parallel_tool_calls=many, **options).choices[0].message
        chunks = [part.choices[0].delta for part in ask(client, stream=True, parallel_tool_calls=many, **options)]
        assert len(message.tool_calls) == count
        assert len([call for part in chunks for call in part.tool_calls or [] if call.id]) == count
        assert message.content == "".join(part.content or "" for part in chunks) == "One.\nTwo."


@pytest.mark.full
def test_a_schema_holds_behind_the_reasoning(client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "c", "schema": CITY}}
    message = ask(client, response_format=form).choices[0].message
    assert message.reasoning_content
    assert json.loads(message.content)["city"] in ("Rome", "Oslo")


def test_refused_budgets(server: RunningServer) -> None:
    with server.http() as http:
        body = {"messages": MESSAGES, "reasoning_effort": "a lot"}
        assert http.post("/v1/chat/completions", json=body).status_code == 400
        body = {"messages": MESSAGES, "thinking_budget": -1}
        assert http.post("/v1/chat/completions", json=body).status_code == 400


def test_a_model_without_reasoning_has_no_budget(request: pytest.FixtureRequest) -> None:
    with running_server() as plain, plain.http() as http:
        answer = http.post("/v1/chat/completions", json={"messages": MESSAGES, "thinking_budget": 5})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "thinking_budget"


@pytest.mark.full
def test_responses_count_the_tokens_of_reasoning(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "input": "Hello", "max_output_tokens": 60, "store": False}
    form = {"format": {"type": "json_schema", "name": "c", "schema": CITY}}
    body = {"thinking_budget": 6}
    response: Any = client.responses.create(**options, text=form, extra_body=body)  # type: ignore[arg-type]
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert 1 <= response.usage.output_tokens_details.reasoning_tokens <= 7  # the budget and the closing mark
    events: Any = list(client.responses.create(**options, text=form, stream=True, extra_body=body))  # type: ignore[arg-type]
    deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert events[-1].response.output[0].content[0].text == "".join(deltas)
