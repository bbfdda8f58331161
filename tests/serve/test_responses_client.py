"""OpenAI's client against `/v1/responses`: shapes, streams, and stored conversations that compute only new tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from serving import RunningServer, running_server

from bifolio.serve.process import conversations
from bifolio.serve.process.conversations import Conversation, ConversationStore
from helpers import tiny_folder

pytestmark = pytest.mark.full  # each module starts a server

TEMPLATE = (  # history is written as the model wrote it, so that a follow-up continues its tokens
    "{% if tools %}tools: {{ tools | tojson }}{{ '\n' }}{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %} call {{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
CITY = {"type": "object", "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}}, "required": ["city"],
        "additionalProperties": False}  # fmt: skip
TOOLS: list[Any] = [{"type": "function", "name": "weather", "parameters": CITY, "strict": True}]
LONG = "the fox lived in a quiet wood and liked to read books about the sea " * 3


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    folder = tiny_folder(tokenizer=True, chat_template=TEMPLATE, max_position_embeddings=1024)
    with running_server(engine={"model": str(folder)}, keys=["first-secret-key", "second-secret-key"]) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return server.client("first-secret-key")


def create(client: openai.OpenAI, given: Any = "Hello", **options: Any) -> Any:
    settings: dict[str, Any] = {"model": "tiny", "max_output_tokens": 10, "temperature": 0, **options}
    return client.responses.create(input=given, **settings)


def test_a_response(client: openai.OpenAI) -> None:
    response = create(client, metadata={"a": "b"})
    assert response.object == "response"
    assert response.id.startswith("resp_")
    assert response.model == "tiny"
    assert response.status in ("completed", "incomplete")
    assert [item.type for item in response.output] == ["message"]
    assert response.output_text == response.output[0].content[0].text != ""
    assert response.usage.output_tokens <= 10
    assert response.metadata == {"a": "b"}


def test_a_stream_is_the_whole(client: openai.OpenAI) -> None:
    whole = create(client)
    events = list(create(client, stream=True))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text == events[-1].response.output_text
    assert events[-1].type == f"response.{whole.status}"
    assert events[-1].response.usage.output_tokens == whole.usage.output_tokens


def test_the_stream_helper(client: openai.OpenAI) -> None:
    form: Any = {"format": {"type": "json_schema", "name": "c", "schema": CITY}}
    with client.responses.stream(model="tiny", input="Hello", max_output_tokens=60, text=form) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert stream.get_final_response().output_text == "".join(deltas)


def test_instructions_and_items(client: openai.OpenAI) -> None:
    plain = create(client, max_output_tokens=1).usage.input_tokens
    assert create(client, instructions="Be kind.", max_output_tokens=1).usage.input_tokens > plain
    items: list[Any] = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "Again"},
    ]
    assert create(client, items, max_output_tokens=1).usage.input_tokens > plain


@pytest.mark.full
def test_a_follow_up_computes_only_new_tokens(server: RunningServer, client: openai.OpenAI) -> None:
    first = create(client, LONG)
    follow = create(client, "And then?", previous_response_id=first.id)
    before = first.usage.total_tokens
    assert follow.previous_response_id == first.id
    # all tokens of the first turn but the last, whose logits were not needed, are found: to the token, not to the block
    assert before - 2 <= follow.usage.input_tokens_details.cached_tokens <= before
    third = create(client, "And?", previous_response_id=follow.id)
    assert third.usage.input_tokens_details.cached_tokens >= follow.usage.total_tokens - 2
    branch = create(client, "Or else?", previous_response_id=first.id)
    assert branch.usage.input_tokens_details.cached_tokens >= before - 2


@pytest.mark.full
def test_a_follow_up_answers_as_the_whole_conversation_does(client: openai.OpenAI) -> None:
    first = create(client, LONG, text={"format": {"type": "json_schema", "name": "c", "schema": CITY}},
                   max_output_tokens=30)  # fmt: skip
    follow = create(client, "And then?", previous_response_id=first.id)
    items: list[Any] = [{"role": "user", "content": LONG}, {"role": "assistant", "content": first.output_text},
                        {"role": "user", "content": "And then?"}]  # fmt: skip
    whole = create(client, items, store=False)
    assert follow.usage.input_tokens >= whole.usage.input_tokens
    assert follow.output_text  # the tokens of the first answer are continued, so the texts may differ


def test_retrieve_list_and_delete(server: RunningServer, client: openai.OpenAI) -> None:
    response = create(client)
    assert client.responses.retrieve(response.id).output_text == response.output_text
    assert client.responses.input_items.list(response.id).data[0].content[0].text == "Hello"  # type: ignore[union-attr]
    client.responses.delete(response.id)
    for call in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError):
            call(response.id)
    with pytest.raises(openai.NotFoundError) as caught:
        create(client, previous_response_id=response.id)
    assert caught.value.code == "previous_response_not_found"


def test_responses_that_are_not_stored(client: openai.OpenAI) -> None:
    response = create(client, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_other_keys_do_not_see_it(server: RunningServer, client: openai.OpenAI) -> None:
    response, other = create(client), server.client("second-secret-key")
    with pytest.raises(openai.NotFoundError):
        other.responses.retrieve(response.id)
    with pytest.raises(openai.NotFoundError):
        create(other, previous_response_id=response.id)
    assert client.responses.retrieve(response.id).id == response.id


def test_a_tool_and_its_result(client: openai.OpenAI) -> None:
    response = create(client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, max_output_tokens=100)
    (call,) = response.output
    assert (call.type, call.name, response.status) == ("function_call", "weather", "completed")
    assert json.loads(call.arguments)["city"] in ("Rome", "Oslo")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    follow = create(client, [result], tools=TOOLS, previous_response_id=response.id, max_output_tokens=3)
    assert follow.usage.output_tokens <= 3


def test_a_streamed_call(client: openai.OpenAI) -> None:
    choice = {"type": "function", "name": "weather"}
    events = list(create(client, tools=TOOLS, tool_choice=choice, max_output_tokens=100, stream=True))
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    (done,) = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert len(deltas) > 1
    assert "".join(deltas) == done.arguments == events[-1].response.output[0].arguments


def test_a_schema(client: openai.OpenAI) -> None:
    form: Any = {"format": {"type": "json_schema", "name": "c", "schema": CITY, "strict": True}}
    assert json.loads(create(client, text=form, max_output_tokens=60).output_text)["city"] in ("Rome", "Oslo")


@pytest.mark.parametrize(
    "options",
    [{"model": "other"}, {"extra_body": {"strange": 1}}, {"previous_response_id": "resp_none"}, {"temperature": -1},
     {"background": True},
     {"tools": TOOLS, "tool_choice": {"type": "function", "name": "none"}}],
)  # fmt: skip
def test_errors_have_openais_shape(client: openai.OpenAI, options: dict[str, Any]) -> None:
    with pytest.raises((openai.BadRequestError, openai.NotFoundError)) as caught:
        create(client, **options)
    body: Any = caught.value.response.json()["error"]
    assert body["message"]
    assert body["type"] == "invalid_request_error"


@pytest.mark.full
def test_kept_blocks_are_released_with_their_responses(server: RunningServer, client: openai.OpenAI) -> None:
    names = [create(client, f"{number} {LONG}").id for number in range(3)]
    held = server.wait_idle()["num_used_blocks"]
    for name in names:
        client.responses.delete(name)
    assert server.wait_idle()["num_used_blocks"] < held


def test_the_store_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, "MAX_ENTRY_BYTES", 100)
    store = ConversationStore(max_entries=3, max_per_share=2, max_bytes=150)
    assert store.add("a", Conversation("x", "1", b"a", "x")) == []
    assert store.add("b", Conversation("x", "2", b"b", "x")) == []
    assert store.find("a", "x") is not None  # used last
    assert store.add("c", Conversation("x", "3", b"c", "x")) == ["2"]
    assert store.find("c", "y") is None
    assert store.add("d", Conversation("y", "4", b"d" * 101, "y")) == ["4"]
    assert store.add("e", Conversation("y", "5", b"e" * 100, "y")) == []
    assert store.add("f", Conversation("z", "6", b"f" * 60, "z")) == ["5"]  # of the share with the most bytes
    assert store.add("g", Conversation("z", "7", b"g", "z")) == ["6"]  # of two shares with the most entries, its own
    assert len(store) == 3


@pytest.mark.parametrize("owners", [("key-0", "key-1"), ("anonymous", "anonymous")])
def test_a_client_that_stores_much_drops_its_own_responses(owners: tuple[str, str]) -> None:
    store = ConversationStore(max_entries=100, max_per_share=100, max_bytes=1000)
    honest, hostile = owners
    for number in range(20):
        store.add(f"h{number}", Conversation(honest, f"h{number}", b"h" * 10, "10.0.0.1"))
    for number in range(200):  # few and large, then many and small
        size = 300 if number < 20 else 1
        store.add(f"b{number}", Conversation(hostile, f"b{number}", b"b" * size, "10.0.0.2"))
    assert all(store.find(f"h{number}", honest) is not None for number in range(20))
    assert [number for number in range(200) if store.find(f"b{number}", hostile)] == list(range(120, 200))


@pytest.mark.full
@pytest.mark.parametrize("has_keys", [True, False])
def test_no_client_drops_the_responses_of_another(has_keys: bool) -> None:
    """Each client with a key of its own, or without keys at an address of its own."""
    keys = ["honest-secret", "hostile-secret"] if has_keys else ["", ""]
    with running_server(keys=keys if has_keys else ()) as server:
        honest, hostile = (
            httpx.Client(
                base_url=server.url, headers={"authorization": f"Bearer {key}"} if key else {}, timeout=60,
                transport=httpx.HTTPTransport(local_address=f"127.0.0.{number}"),
            )
            for number, key in enumerate(keys, 1)
        )  # fmt: skip
        body = {"input": "a", "max_output_tokens": 1}
        ours = honest.post("/v1/responses", json=body).json()["id"]
        tool = {"type": "function", "name": "f", "description": "d" * (60 << 10)}
        for _ in range(20):  # 3.8 MB each, of fields that are stored and not part of the prompt
            large = {**body, "tools": [tool] * 64, "tool_choice": "none"}
            assert hostile.post("/v1/responses", json=large).status_code == 200
        item = {"role": "user", "content": "a", "encrypted_content": "e" * (3900 << 10)}
        stored = hostile.post("/v1/responses", json={**body, "input": [item]}).json()["id"]
        kept = hostile.get(f"/v1/responses/{stored}/input_items").json()["data"][0]
        assert kept["content"] == "a"
        assert "encrypted_content" not in kept
        assert honest.get(f"/v1/responses/{ours}").status_code == 200
