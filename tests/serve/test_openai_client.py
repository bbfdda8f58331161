"""Every endpoint and option through OpenAI's own client, streaming and not."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import openai
import pytest
from serving import ENGINE, RunningServer, model_folder

from bifolio.api.llm import LLM
from bifolio.model.sampling_defaults import SMALL_DEFAULTS
from bifolio.sampling_params import SamplingParams

GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 12, "extra_body": {"ignore_eos": True}}
PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(model_folder(), **ENGINE)


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return server.client()


def offline(llm: LLM, prompt: Any, **params: Any) -> Any:
    settings = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, **params}
    return llm.generate(prompt, SamplingParams(**settings), use_tqdm=False)[0]


# -- completions --------------------------------------------------------------------------------------------------


def test_a_completion_is_what_the_offline_api_gives(client: openai.OpenAI, llm: LLM) -> None:
    answer = client.completions.create(prompt=PROMPT, **GREEDY)
    expected = offline(llm, PROMPT)
    assert answer.object == "text_completion"
    assert answer.choices[0].text == expected.outputs[0].text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(expected.prompt_token_ids), 12)
    assert answer.usage.total_tokens == len(expected.prompt_token_ids) + 12


def test_prompts_as_tokens_and_lists(client: openai.OpenAI, llm: LLM) -> None:
    tokens = llm.model.require_tokenizer().encode(PROMPT)
    expected = offline(llm, PROMPT).outputs[0].text
    for prompt in (tokens, [PROMPT, "The fox"], [tokens, tokens[:3]]):
        answer = client.completions.create(prompt=prompt, **GREEDY)
        assert answer.choices[0].text == expected
        assert [choice.index for choice in answer.choices] == list(range(len(answer.choices)))
    other = client.completions.create(prompt=["The fox", PROMPT], **GREEDY)
    assert other.choices[1].text == expected


def test_a_stream_adds_up_to_the_whole(client: openai.OpenAI, llm: LLM) -> None:
    chunks = list(client.completions.create(prompt=PROMPT, stream=True, **GREEDY))
    assert "".join(chunk.choices[0].text for chunk in chunks) == offline(llm, PROMPT).outputs[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


def test_usage_comes_last_when_it_is_asked_for(client: openai.OpenAI) -> None:
    options = {**GREEDY, "stream_options": {"include_usage": True}}
    chunks = list(client.completions.create(prompt=PROMPT, stream=True, **options))
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_n_and_seed(client: openai.OpenAI, llm: LLM) -> None:
    options: dict[str, Any] = {"model": "tiny", "n": 3, "seed": 7, "max_tokens": 8, "extra_body": {"ignore_eos": True}}
    whole = client.completions.create(prompt=PROMPT, **options)
    expected = offline(llm, PROMPT, n=3, seed=7, temperature=1.0, max_tokens=8)
    assert [choice.text for choice in whole.choices] == [output.text for output in expected.outputs]
    texts = ["", "", ""]
    ends = 0
    for chunk in client.completions.create(prompt=PROMPT, stream=True, **options):
        texts[chunk.choices[0].index] += chunk.choices[0].text
        ends += chunk.choices[0].finish_reason is not None
    assert texts == [output.text for output in expected.outputs]
    assert ends == 3


def test_best_of(client: openai.OpenAI, llm: LLM) -> None:
    options: dict[str, Any] = {"model": "tiny", "seed": 7, "max_tokens": 8, "extra_body": {"ignore_eos": True}}
    answer = client.completions.create(prompt=PROMPT, n=2, best_of=4, **options)
    expected = offline(llm, PROMPT, n=2, best_of=4, seed=7, temperature=1.0, max_tokens=8)
    assert [choice.text for choice in answer.choices] == [output.text for output in expected.outputs]
    with pytest.raises(openai.BadRequestError):
        client.completions.create(prompt=PROMPT, n=1, best_of=2, stream=True, **options)


def test_echo_with_logprobs_of_the_prompt(client: openai.OpenAI, llm: LLM) -> None:
    expected = offline(llm, PROMPT, prompt_logprobs=2, logprobs=2, max_tokens=1)
    for limit in (0, 1):
        answer = client.completions.create(
            model="tiny", prompt=PROMPT, echo=True, logprobs=2, max_tokens=limit, temperature=0
        )
        choice = answer.choices[0]
        assert choice.logprobs is not None
        count = len(expected.prompt_token_ids)
        assert choice.text.startswith(PROMPT)
        assert len(choice.logprobs.tokens or []) == count + limit
        assert "".join((choice.logprobs.tokens or [])[:count]) == PROMPT
        found = choice.logprobs.token_logprobs or []
        assert found[0] is None
        theirs = [item.logprob for item in expected.prompt_logprobs[1:]]
        np.testing.assert_allclose(found[1:count], theirs, atol=1e-5)
        tokens = choice.logprobs.tokens or []
        assert choice.logprobs.text_offset == [len("".join(tokens[:number])) for number in range(count + limit)]
        for top, value in zip((choice.logprobs.top_logprobs or [])[1:], found[1:], strict=True):
            assert value in top.values()
            assert 2 <= len(top) <= 3
        assert answer.usage is not None
        assert answer.usage.completion_tokens == limit
        assert (choice.text == PROMPT) == (limit == 0)


def test_echo_in_a_stream(client: openai.OpenAI) -> None:
    options = {**GREEDY, "logprobs": 1, "echo": True}
    whole = client.completions.create(prompt=PROMPT, **options).choices[0]
    chunks = list(client.completions.create(prompt=PROMPT, stream=True, **options))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.text
    assert whole.logprobs is not None
    for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        parts = [item for chunk in chunks for item in getattr(chunk.choices[0].logprobs, name)]
        assert parts == getattr(whole.logprobs, name), name


def test_stop(client: openai.OpenAI, llm: LLM) -> None:
    text = offline(llm, PROMPT).outputs[0].text
    stop = text[4:7]
    answer = client.completions.create(prompt=PROMPT, stop=stop, **GREEDY)
    assert answer.choices[0].text == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].stop_reason == stop  # type: ignore[attr-defined]
    streamed = client.completions.create(prompt=PROMPT, stop=[stop], stream=True, **GREEDY)
    assert "".join(chunk.choices[0].text for chunk in streamed) == text[: text.index(stop)]


def test_logit_bias_and_penalties_and_our_samplers(client: openai.OpenAI, llm: LLM) -> None:
    options: dict[str, Any] = {"seed": 3, "max_tokens": 10, "presence_penalty": 0.5, "frequency_penalty": 0.3}
    ours: dict[str, Any] = {
        "ignore_eos": True, "top_k": 20, "min_p": 0.01, "typical_p": 0.95, "repetition_penalty": 1.1,
        "xtc_probability": 0.2, "xtc_threshold": 0.1, "dry_multiplier": 0.8, "no_repeat_ngram_size": 3,
        "min_tokens": 2, "bad_words": ["fox"],
    }  # fmt: skip
    answer = client.completions.create(
        model="tiny", prompt=PROMPT, logit_bias={"50": 2.0}, temperature=0.9, top_p=0.9, extra_body=ours, **options
    )
    expected = offline(llm, PROMPT, temperature=0.9, top_p=0.9, logit_bias={50: 2.0}, **options, **ours)
    assert answer.choices[0].text == expected.outputs[0].text
    forced = client.completions.create(model="tiny", prompt=PROMPT, logit_bias={"70": 1000}, max_tokens=4)
    assert forced.choices[0].text == llm.model.require_tokenizer().decode([70] * 4)


def test_token_ids_on_request(client: openai.OpenAI, llm: LLM) -> None:
    expected = offline(llm, PROMPT)
    answer = client.completions.create(
        model="tiny", prompt=PROMPT, temperature=0, max_tokens=12,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )  # fmt: skip
    assert answer.choices[0].token_ids == expected.outputs[0].token_ids  # type: ignore[attr-defined]
    assert answer.choices[0].prompt_token_ids == expected.prompt_token_ids  # type: ignore[attr-defined]


def test_cached_prompt_tokens_are_counted(client: openai.OpenAI) -> None:
    prompt = [11 + number % 50 for number in range(64)]
    first = client.completions.create(prompt=prompt, **GREEDY)
    second = client.completions.create(prompt=prompt, **GREEDY)
    assert first.choices[0].text == second.choices[0].text
    for answer, cached in ((first, 0), (second, 56)):
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == cached
    salted = client.completions.create(
        model="tiny", prompt=prompt, max_tokens=1, extra_body={"cache_salt": "mine", "ignore_eos": True}
    )
    assert salted.usage is not None
    assert salted.usage.prompt_tokens_details is not None
    assert salted.usage.prompt_tokens_details.cached_tokens == 0


# -- chat ---------------------------------------------------------------------------------------------------------

MESSAGES: list[Any] = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}]
CHAT: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 10, "extra_body": {"ignore_eos": True}}


@pytest.mark.full
def test_a_chat_uses_the_template(client: openai.OpenAI, llm: LLM) -> None:
    answer = client.chat.completions.create(messages=MESSAGES, **CHAT)
    expected = offline(llm, "system: Be kind.\nuser: Hello\nassistant:", max_tokens=10)
    assert answer.choices[0].message.content == expected.outputs[0].text
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    hello = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    parts = [MESSAGES[0], {"role": "user", "content": hello}]
    again = client.chat.completions.create(messages=parts, **CHAT)  # type: ignore[arg-type]
    assert again.choices[0].message.content == expected.outputs[0].text


def test_a_chat_without_options_uses_the_sampling_defaults_that_the_model_card_lists(
    client: openai.OpenAI, llm: LLM
) -> None:
    card = client.models.retrieve("tiny").model_dump()
    expected_defaults = {**SMALL_DEFAULTS, "repetition_penalty": 1.0}
    assert {name: card["sampling_defaults"][name] for name in expected_defaults} == expected_defaults
    options: dict[str, Any] = {"model": "tiny", "seed": 3, "max_tokens": 10, "extra_body": {"ignore_eos": True}}
    answer = client.chat.completions.create(messages=MESSAGES, **options)
    prompt = "system: Be kind.\nuser: Hello\nassistant:"
    expected = offline(llm, prompt, max_tokens=10, seed=3, **SMALL_DEFAULTS)
    assert answer.choices[0].message.content == expected.outputs[0].text


def test_a_chat_stream(client: openai.OpenAI, llm: LLM) -> None:
    options = {**CHAT, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(messages=MESSAGES, stream=True, **options))
    expected = offline(llm, "system: Be kind.\nuser: Hello\nassistant:", max_tokens=10)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == expected.outputs[0].text
    assert chunks[-1].usage is not None
    assert chunks[-2].choices[0].finish_reason == "length"


def test_chat_logprobs(client: openai.OpenAI, llm: LLM) -> None:
    answer = client.chat.completions.create(messages=MESSAGES, logprobs=True, top_logprobs=3, **CHAT)
    expected = offline(llm, "system: Be kind.\nuser: Hello\nassistant:", max_tokens=10, logprobs=3)
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content or []
    np.testing.assert_allclose(
        [item.logprob for item in content], [item.logprob for item in expected.outputs[0].logprobs], atol=1e-5
    )
    assert all(len(item.top_logprobs) == 3 for item in content)
    assert all(item.top_logprobs[0].token == item.token for item in content)  # greedy
    raw = bytes(byte for item in content for byte in item.bytes or [])
    assert raw.decode(errors="replace") == expected.outputs[0].text
    streamed: list[Any] = []
    for chunk in client.chat.completions.create(messages=MESSAGES, logprobs=True, stream=True, **CHAT):
        if chunk.choices[0].logprobs is not None:
            streamed += chunk.choices[0].logprobs.content or []
    assert [item.token for item in streamed] == [item.token for item in content]


def test_max_completion_tokens(client: openai.OpenAI) -> None:
    options = {**CHAT, "max_tokens": None}
    answer = client.chat.completions.create(messages=MESSAGES, max_completion_tokens=3, **options)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3


# -- errors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": "x", "temperature": -1},
        {"prompt": "x", "temperature": "hot"},
        {"prompt": "x", "max_tokens": 1.5},
        {"prompt": "x", "n": 0},
        {"prompt": "x", "n": 100},
        {"prompt": "x", "unknown_option": 1},
        {"prompt": []},
        {"prompt": ""},
        {"prompt": [10**9]},
        {"prompt": ["x", 3]},
        {"prompt": "x", "stop": [""]},
        {"prompt": "x", "logit_bias": {"many": 1}},
        {"prompt": "x", "logit_bias": {"99999": 1}},
        {"prompt": "x", "allowed_token_ids": []},
        {"prompt": [5] * 600},
        {"prompt": "x", "best_of": 1, "n": 2},
        {"prompt": "x", "min_tokens": 9, "max_tokens": 3},
        {"prompt": "x", "suffix": "y"},
        {"prompt": None},
        [1],
        "x",
    ],
)
def test_bad_requests_are_400_in_the_right_shape(server: RunningServer, body: Any) -> None:
    with server.http() as http:
        answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["message"]


def test_not_json_is_400(server: RunningServer) -> None:
    with server.http() as http:
        for body in (b"", b"{", b"\xff\xfe", b"[" * 100000, b'{"prompt": "x", "temperature": NaN}', b"nul"):
            answer = http.post("/v1/completions", content=body)
            assert answer.status_code == 400, body[:20]
            assert answer.json()["error"]["message"]


def test_wrong_paths_and_methods(server: RunningServer) -> None:
    with server.http() as http:
        assert http.get("/nothing").status_code == 404
        assert http.get("/v1/completions").status_code == 405
        assert json.loads(http.get("/nothing").text)["error"]["type"] == "invalid_request_error"


def test_a_text_that_cannot_fit_is_refused_without_encoding_it(server: RunningServer) -> None:
    with server.http() as http:
        long = http.post("/v1/completions", json={"prompt": "x" * 2_000_000})
        assert long.status_code == 400
        assert long.json()["error"]["code"] == "context_length_exceeded"
        tokens = http.post("/v1/completions", json={"prompt": "x " * 1000})
        assert tokens.json()["error"]["code"] == "context_length_exceeded"
