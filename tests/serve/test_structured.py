"""Structured output, tools and beams over HTTP."""

from __future__ import annotations

import json
import re
import threading
import time
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from serving import RunningServer, running_server, sse_events

from helpers import tiny_folder, tiny_tokenizer, without_decoder

pytestmark = pytest.mark.full  # each module starts a server

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "s": {"type": "string", "maxLength": 5}},
    "required": ["n", "s"],
    "additionalProperties": False,
}
MESSAGES: list[Any] = [{"role": "user", "content": "Hello"}]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "How is it there?",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Rome", "Oslo"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return server.client()


@pytest.mark.full
def test_response_format_json_schema(client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    for seed in range(5):
        answer = client.chat.completions.create(
            model="tiny", messages=MESSAGES, response_format=form, max_tokens=100, seed=seed
        )
        assert answer.choices[0].finish_reason == "stop"
        jsonschema.validate(json.loads(answer.choices[0].message.content or ""), SCHEMA)
    streamed = client.chat.completions.create(
        model="tiny", messages=MESSAGES, response_format=form, max_tokens=100, stream=True
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed)
    jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.full
def test_forced_tokens_are_counted(server: RunningServer, client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    options: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 100, "seed": 1}

    def num_forced() -> float:
        time.sleep(0.3)  # the engine reports its counters in intervals
        found = re.search(r"^bifolio:forced_tokens_total (.*)$", httpx.get(f"{server.url}/metrics").text, re.MULTILINE)
        return 0.0 if found is None else float(found[1])

    counts, before = [], num_forced()
    for more in ({"response_format": form}, {"response_format": form, "logprobs": True}, {}):
        usage = client.chat.completions.create(**options, **more).usage
        assert usage is not None
        counts.append(usage.model_dump()["completion_tokens_details"]["forced_tokens"])
    assert counts[0] > 5  # `{"n":`, `,"s":"` and the end
    assert counts[1:] == [0, 0]
    deadline = time.monotonic() + 10
    while num_forced() < before + counts[0]:
        assert time.monotonic() < deadline, "the counter of forced tokens does not show them"
        time.sleep(0.1)


@pytest.mark.full
@pytest.mark.parametrize("where", ["response_format", "structured_outputs"])
def test_a_structural_tag_begins_at_its_trigger(client: openai.OpenAI, where: str) -> None:
    city = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"],
            "additionalProperties": False}  # fmt: skip
    tag = {"begin": "<city>", "content": {"type": "json_schema", "json_schema": city}, "end": "</city>"}
    form = {"type": "triggered_tags", "triggers": ["<"], "tags": [tag], "at_least_one": True, "stop_after_first": True}
    asked: Any = {"type": "structural_tag", "format": form}
    body = (
        {"response_format": asked} if where == "response_format" else {"structured_outputs": {"structural_tag": asked}}
    )
    [trigger] = tiny_tokenizer().encode("<", add_special_tokens=False).ids
    for seed in range(3):
        answer = client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=100, seed=seed, logit_bias={str(trigger): 12}, extra_body=body
        ).choices[0]
        found = re.fullmatch(r"([^<]*)<city>(.*)</city>", answer.message.content or "", re.DOTALL)
        assert found is not None
        assert answer.finish_reason == "stop"
        jsonschema.validate(json.loads(found[2]), city)


@pytest.mark.full
@pytest.mark.parametrize(("form", "words"), [
    ({"type": "structural_tag", "triggers": ["<"], "structures": [{"begin": "[", "schema": {}}]}, "add one to"),
    ({"type": "json_object", "triggers": ["<"]}, "triggers needs"),
])  # fmt: skip
def test_a_structural_tag_with_a_mistake_is_refused(client: openai.OpenAI, form: Any, words: str) -> None:
    with pytest.raises(openai.BadRequestError, match=words):
        client.chat.completions.create(model="tiny", messages=MESSAGES, response_format=form)


@pytest.mark.full
def test_response_format_json_object(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, response_format={"type": "json_object"}, max_tokens=200, temperature=0
    )
    content = answer.choices[0].message.content or ""
    assert content.startswith("{")
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(content), dict)


@pytest.mark.parametrize(
    ("outputs", "check"),
    [
        ({"regex": "[a-f]{2}-[0-9]{3}"}, lambda text: re.fullmatch("[a-f]{2}-[0-9]{3}", text)),
        ({"choice": ["red", "green"]}, lambda text: text in ("red", "green")),
        ({"json": SCHEMA}, lambda text: jsonschema.validate(json.loads(text), SCHEMA) is None),
        ({"grammar": 'start: "a" ("b" | "c"){2}'}, lambda text: re.fullmatch("a[bc]{2}", text)),
    ],
)
def test_structured_outputs(client: openai.OpenAI, outputs: dict[str, Any], check: Any) -> None:
    answer = client.completions.create(
        model="tiny", prompt="Once", n=3, max_tokens=100, seed=1, logprobs=1, extra_body={"structured_outputs": outputs}
    )
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        assert check(choice.text), choice.text


@pytest.mark.parametrize(
    "body",
    [
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "xml"}},
        {"structured_outputs": {}},
        {"structured_outputs": {"regex": "("}},
        {"structured_outputs": {"regex": "a", "choice": ["b"]}},
        {"structured_outputs": {"choice": []}},
        {"structured_outputs": {"grammar": "begin"}},
        {"structured_outputs": {"json": {"type": "strange"}}},
        {"structured_outputs": {"json": 5}},
        {"structured_outputs": {"regex": "(" * 4000 + ")" * 4000}},
        {"structured_outputs": {"json": {"enum": ["x" * 100000]}}},
        {"beam_search": {"width": 2}, "temperature": 0.5},
        {"beam_search": {"width": 2}, "n": 3},
        {"beam_search": {"width": 100}},
    ],
)
def test_wrong_grammars_are_400(server: RunningServer, body: dict[str, Any]) -> None:
    with server.http() as http:
        answer = http.post("/v1/completions", json={"prompt": "x", **body})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]


@pytest.mark.full
def test_hostile_schemas_do_not_stop_other_streams(server: RunningServer, client: openai.OpenAI) -> None:
    """One stream runs; meanwhile hostile schemas are refused. The longest silence of the stream is bounded."""
    gaps: list[float] = []

    def stream() -> None:
        last = time.perf_counter()
        for _ in client.completions.create(
            model="tiny", prompt="Once", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
        ):
            gaps.append(time.perf_counter() - last)
            last = time.perf_counter()

    thread = threading.Thread(target=stream)
    thread.start()
    nested: Any = {}
    for _ in range(40):
        nested = {"type": "object", "properties": {f"k{n}": nested if n == 0 else {} for n in range(3)}}
    hostile: list[Any] = [
        {"allOf": [{"anyOf": [{"properties": {f"a{i}": {"const": j}}} for j in range(10)]} for i in range(12)]},
        {"properties": {f"p{n}": {"type": "string", "pattern": f"^[a-z]{{{n}}}$"} for n in range(900)}},
        {"type": "integer", "multipleOf": 999983, "minimum": 1, "maximum": 10**15},
        {"$ref": "#"},
        nested,
    ]
    with server.http() as http:
        for schema in hostile:
            body = {"prompt": "x", "max_tokens": 4, "structured_outputs": {"json": schema}}
            began = time.perf_counter()
            answer = http.post("/v1/completions", json=body)
            assert answer.status_code in (200, 400), answer.text
            assert time.perf_counter() - began < 15
    thread.join()
    assert len(gaps) > 3
    assert max(gaps) < 10


# -- tools --------------------------------------------------------------------------------------------------------


def test_a_named_tool_is_called(client: openai.OpenAI) -> None:
    choice: Any = {"type": "function", "function": {"name": "weather"}}
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, tools=TOOLS, tool_choice=choice, max_tokens=100
    )
    assert answer.choices[0].finish_reason == "tool_calls"
    assert answer.choices[0].message.content is None
    calls: Any = answer.choices[0].message.tool_calls
    assert [call.function.name for call in calls] == ["weather"]
    assert json.loads(calls[0].function.arguments)["city"] in ("Rome", "Oslo")


def test_a_required_tool_in_a_stream(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            tools=TOOLS,
            tool_choice="required",
            max_tokens=150,
            stream=True,
            seed=2,
            parallel_tool_calls=False,
        )
    )
    calls: list[Any] = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert {call.index for call in calls} == {0}
    assert calls[0].function.name in ("weather", "now")
    assert calls[0].id.startswith("call_")
    assert len(calls) > 1  # the arguments arrive in pieces
    assert all(call.id is None and call.function.name is None for call in calls[1:])
    json.loads("".join(call.function.arguments for call in calls))


def test_tools_are_shown_to_the_template(server: RunningServer, client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=1)
    shown = client.chat.completions.create(model="tiny", messages=MESSAGES, tools=TOOLS, max_tokens=1)
    hidden = client.chat.completions.create(
        model="tiny", messages=MESSAGES, tools=TOOLS, tool_choice="none", max_tokens=1
    )
    counts = [answer.usage.prompt_tokens for answer in (plain, shown, hidden) if answer.usage]
    assert counts[1] > counts[0] + 50
    assert counts[2] == counts[0]


def test_a_conversation_with_calls_and_answers(client: openai.OpenAI) -> None:
    messages: list[Any] = [
        *MESSAGES,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    answer = client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS, max_tokens=2)
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 2


def test_bad_tools_are_400(server: RunningServer) -> None:
    with server.http() as http:
        for body in (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "none of them"}}},
            {"tool_choice": "required"},
            {"tools": [TOOLS[0], TOOLS[0]]},
            {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
        ):
            answer = http.post("/v1/chat/completions", json={"messages": MESSAGES, **body})
            assert answer.status_code == 400, answer.text


# -- beams --------------------------------------------------------------------------------------------------------


def test_beams_come_best_first(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "prompt": "Once", "max_tokens": 8, "n": 3}
    answer = client.completions.create(**options, extra_body={"beam_search": {"width": 4}, "return_token_ids": True})
    scores = [choice.beam["score"] for choice in answer.choices]  # type: ignore[attr-defined]
    assert scores == sorted(scores, reverse=True)
    assert len({tuple(choice.token_ids) for choice in answer.choices}) == 3  # type: ignore[attr-defined]
    chunks = list(client.completions.create(**options, stream=True, extra_body={"beam_search": {"width": 4}}))
    assert [chunk.choices[0].text for chunk in chunks] == [choice.text for choice in answer.choices]


def test_beams_without_bad_words(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "prompt": "Once", "max_tokens": 6, "n": 3}
    search: dict[str, Any] = {"beam_search": {"width": 3}, "allowed_token_ids": list(range(40, 60))}
    texts = [choice.text for choice in client.completions.create(**options, extra_body=search).choices]
    word = texts[0][0]
    found = client.completions.create(**options, extra_body={**search, "bad_words": [word]}).choices
    assert len(found) == 3
    assert not any(word in choice.text for choice in found)


def test_fewer_texts_than_asked_for_are_fewer_choices(server: RunningServer) -> None:
    body = {"prompt": "Once", "max_tokens": 3, "n": 3, "beam_search": {"width": 3}, "ignore_eos": True}
    with server.http() as http:
        for echo in (False, True):
            answer = http.post("/v1/completions", json={**body, "allowed_token_ids": [40], "echo": echo}).json()
            assert [(c["index"], c["finish_reason"]) for c in answer["choices"]] == [(0, "length")]
            one = {**body, "allowed_token_ids": [40], "echo": echo, "stream": True}
            chunks = sse_events(http.post("/v1/completions", json=one).text)[:-1]
            assert {choice["index"] for chunk in chunks for choice in chunk["choices"]} == {0}
            assert (
                "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
                == answer["choices"][0]["text"]
            )
        chat = {"messages": MESSAGES, "max_tokens": 3, "n": 2, "beam_search": {"width": 2}, "allowed_token_ids": [40]}
        answer = http.post("/v1/chat/completions", json=chat).json()
        assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"]


def test_a_search_without_a_possible_text_is_an_error(server: RunningServer) -> None:
    body = {"prompt": "Once", "max_tokens": 9, "beam_search": {"width": 2}, "allowed_token_ids": [40]}
    with server.http() as http:
        for stream in (False, True):
            answer = http.post("/v1/completions", json={**body, "no_repeat_ngram_size": 2, "stream": stream})
            assert "no token can follow" in answer.text
            assert stream or answer.status_code == 400
        server.wait_idle()


def test_a_constrained_beam_search(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        n=2,
        max_tokens=60,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
        extra_body={"beam_search": {"width": 3, "length_penalty": 0.5}},
    )
    assert len(answer.choices) == 2
    assert all((choice.message.content or "").startswith("{") for choice in answer.choices)
    for choice in answer.choices:
        if choice.finish_reason == "stop":
            jsonschema.validate(json.loads(choice.message.content or ""), SCHEMA)


@pytest.mark.full
def test_a_tokenizer_that_llguidance_cannot_read_stops_structured_output_alone() -> None:
    folder = without_decoder(tiny_folder(tokenizer=True, max_position_embeddings=512))
    with running_server(engine={"model": str(folder)}) as server, server.http() as http:
        body = {"prompt": "Once upon a time", "max_tokens": 5, "ignore_eos": True}
        assert http.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 5
        for _ in range(2):
            refused = http.post("/v1/completions", json={**body, "structured_outputs": {"regex": "[a-z]+"}})
            assert refused.status_code == 400
            assert "whose tokenizer llguidance cannot read" in refused.json()["error"]["message"]
        assert http.post("/v1/completions", json=body).status_code == 200
