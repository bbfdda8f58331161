"""Anthropic's own client against `/v1/messages`."""

from __future__ import annotations

import json
from typing import Any

import pytest
from serving import RunningServer, running_server
from test_tools import TEMPLATE as THINKING_TEMPLATE

from helpers import tiny_folder

pytestmark = pytest.mark.full  # each module starts a server

USER: list[Any] = [{"role": "user", "content": "Hello"}]
TOOLS: list[Any] = [
    {
        "name": "weather",
        "description": "How is it there?",
        "input_schema": {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"],
                         "additionalProperties": False},
    },
    {"name": "now", "input_schema": {"type": "object", "properties": {}, "additionalProperties": False}},
]  # fmt: skip


@pytest.fixture(scope="module")
def anthropic() -> Any:
    """The package: two seconds to import, so tests alone load it, not their collection."""
    return pytest.importorskip("anthropic")


@pytest.fixture(scope="module")
def client(server: RunningServer, anthropic: Any) -> Any:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60)


def create(client: Any, **options: Any) -> Any:
    """Newer clients have no arguments for sampling: the values are sent in `extra_body`."""
    sampling = {name: options.pop(name) for name in ("temperature", "top_p", "top_k") if name in options}
    options["extra_body"] = {**sampling, **options.get("extra_body", {})}
    return client.messages.create(**{"model": "tiny", "messages": USER, "max_tokens": 10, **options})


def test_a_message(client: Any) -> None:
    message = create(client, temperature=0.0, top_p=0.9, top_k=5)
    assert (message.type, message.role, message.model) == ("message", "assistant", "tiny")
    assert [block.type for block in message.content] == ["text"]
    assert message.usage.output_tokens <= 10
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens > 5
    assert message.stop_reason in ("max_tokens", "end_turn")


def test_a_stream_is_the_whole(client: Any) -> None:
    whole = create(client, temperature=0.0)
    greedy = {"temperature": 0.0}
    with client.messages.stream(model="tiny", messages=USER, max_tokens=10, extra_body=greedy) as stream:
        texts = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(texts) == final.content[0].text == whole.content[0].text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_events_of_a_stream(client: Any) -> None:
    events = list(create(client, stream=True, temperature=0.0))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}


def test_system_prompts_are_read(client: Any) -> None:
    plain = create(client, max_tokens=1).usage
    total = plain.input_tokens + plain.cache_read_input_tokens
    for system in ("Be kind.", [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}]):
        usage = create(client, max_tokens=1, system=system).usage
        assert usage.input_tokens + usage.cache_read_input_tokens > total


def test_a_stop_sequence(client: Any) -> None:
    text = create(client, temperature=0.0, max_tokens=30).content[0].text
    stop = text[4:6]
    message = create(client, temperature=0.0, max_tokens=30, stop_sequences=[stop])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert message.content[0].text == text[: text.index(stop)]


def test_an_enforced_tool(client: Any) -> None:
    message = create(client, tools=TOOLS, tool_choice={"type": "tool", "name": "weather"}, max_tokens=100)
    assert message.stop_reason == "tool_use"
    (block,) = message.content
    assert (block.type, block.name) == ("tool_use", "weather")
    assert block.input["city"] in ("Rome", "Oslo")
    assert block.id.startswith("toolu_")


def test_any_tool_in_a_stream(client: Any) -> None:
    choice = {"type": "any", "disable_parallel_tool_use": True}
    with client.messages.stream(model="tiny", messages=USER, max_tokens=100, tools=TOOLS, tool_choice=choice) as stream:
        deltas = [event.delta.partial_json for event in stream if event.type == "content_block_delta"]
        final = stream.get_final_message()
    assert final.stop_reason == "tool_use"
    assert json.loads("".join(deltas)) == final.content[0].input


def test_tools_that_are_not_chosen(client: Any) -> None:
    seen = create(client, tools=TOOLS, max_tokens=1).usage
    hidden = create(client, tools=TOOLS, tool_choice={"type": "none"}, max_tokens=1).usage
    total = [usage.input_tokens + usage.cache_read_input_tokens for usage in (seen, hidden)]
    assert total[0] > total[1]


def test_results_of_tools(client: Any) -> None:
    messages = [
        *USER,
        {"role": "assistant", "content": [{"type": "text", "text": "I look."}, {"type": "tool_use", "id": "t1",
                                          "name": "weather", "input": {"city": "Rome"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1",
                                      "content": [{"type": "text", "text": "sunny"}]},
                                     {"type": "text", "text": "And now?"}]},
    ]  # fmt: skip
    assert create(client, messages=messages, tools=TOOLS, max_tokens=3).usage.output_tokens <= 3


def test_count_tokens(client: Any) -> None:
    counted = client.messages.count_tokens(model="tiny", messages=USER, system="Be kind.", tools=TOOLS)
    usage = create(client, system="Be kind.", tools=TOOLS, max_tokens=1).usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_cached_tokens_are_counted(client: Any) -> None:
    messages = [{"role": "user", "content": "the fox lived in a quiet wood and liked to read " * 3}]
    create(client, messages=messages, max_tokens=2)
    usage = create(client, messages=messages, max_tokens=2).usage
    assert usage.cache_read_input_tokens > usage.input_tokens


def test_a_schema(client: Any) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9, "minimum": 0}},
              "required": ["n"], "additionalProperties": False}  # fmt: skip
    form = {"format": {"type": "json_schema", "schema": schema}}
    message = create(client, extra_body={"output_config": form}, max_tokens=40)
    assert 0 <= json.loads(message.content[0].text)["n"] <= 9


@pytest.mark.parametrize(
    ("options", "error", "kind"),
    [
        ({"max_tokens": 0}, "BadRequestError", "invalid_request_error"),
        ({"model": "other"}, "NotFoundError", "not_found_error"),
        ({"messages": []}, "BadRequestError", "invalid_request_error"),
        ({"extra_body": {"strange": 1}}, "BadRequestError", "invalid_request_error"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "BadRequestError",
         "invalid_request_error"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "none"}}, "BadRequestError",
         "invalid_request_error"),
    ],
)  # fmt: skip
def test_errors_have_anthropics_shape(
    anthropic: Any, client: Any, options: dict[str, Any], error: str, kind: str
) -> None:
    with pytest.raises(getattr(anthropic, error)) as caught:
        create(client, **options)
    body = caught.value.response.json()
    assert body["type"] == "error"
    assert body["error"]["type"] == kind
    assert body["error"]["message"]


@pytest.mark.full
def test_thinking(anthropic: Any) -> None:
    folder = tiny_folder(tokenizer=True, chat_template=THINKING_TEMPLATE, max_position_embeddings=1024)
    with running_server(engine={"model": str(folder)}) as server:
        client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60)
        thinking = {"type": "enabled", "budget_tokens": 5}
        options: dict[str, Any] = {"thinking": thinking, "max_tokens": 60, "extra_body": {"temperature": 0.0}}
        message = create(client, **options)
        assert message.content[0].type == "thinking"
        events = list(create(client, stream=True, **options))
        deltas = [event.delta.thinking for event in events
                  if event.type == "content_block_delta" and event.delta.type == "thinking_delta"]  # fmt: skip
        assert "".join(deltas) == message.content[0].thinking
        quiet = create(client, thinking={"type": "disabled"}, max_tokens=5)
        assert all(block.type == "text" for block in quiet.content)
