"""Stop texts, which the front end finds: the output is that of `LLM.generate`, which checks every token."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from serving import ENGINE, RunningServer, model_folder

from bifolio.api.llm import LLM
from bifolio.sampling_params import SamplingParams

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(model_folder(), **ENGINE)


def options(**extra: Any) -> dict[str, Any]:
    body = {"ignore_eos": True, "return_token_ids": True, **extra}
    return {"model": "tiny", "prompt": PROMPT, "max_tokens": 40, "seed": 5, "extra_body": body}


@pytest.mark.full
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_text_cuts_text_tokens_and_logprobs(
    server: RunningServer, llm: LLM, stream: bool, include: bool
) -> None:
    free = SamplingParams(n=3, temperature=1.0, max_tokens=40, seed=5, ignore_eos=True, logprobs=2)
    texts = [output.text for output in llm.generate(PROMPT, free, use_tqdm=False)[0].outputs]
    stops = [texts[0][9:12], texts[1][20:22]]
    params = SamplingParams(
        n=3, temperature=1.0, max_tokens=40, seed=5, ignore_eos=True, logprobs=2, stop=stops,
        include_stop_str_in_output=include,
    )  # fmt: skip
    expected = llm.generate(PROMPT, params, use_tqdm=False)[0].outputs
    assert any(output.finish_reason == "stop" for output in expected)
    call = options(include_stop_str_in_output=include)
    call |= {"n": 3, "temperature": 1, "logprobs": 2, "stop": stops}
    client = server.client()
    found = _streamed(client, call) if stream else _whole(client, call)
    assert found["usage"] == sum(len(output.token_ids) for output in expected)
    for output in expected:
        assert found[output.index] == {
            "text": output.text,
            "token_ids": output.token_ids,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
            "num_scored": len(output.token_ids),
        }


def _whole(client: openai.OpenAI, call: dict[str, Any]) -> dict[Any, Any]:
    answer: Any = client.completions.create(**call)
    found: dict[Any, Any] = {choice.index: _seen(choice, choice.text, choice.token_ids) for choice in answer.choices}
    for choice in answer.choices:
        found[choice.index]["num_scored"] = len(choice.logprobs.tokens)
    return found | {"usage": answer.usage.completion_tokens}


def _streamed(client: openai.OpenAI, call: dict[str, Any]) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for chunk in client.completions.create(**call, stream=True, stream_options={"include_usage": True}):
        if chunk.usage is not None:
            found["usage"] = chunk.usage.completion_tokens
        for choice in chunk.choices:
            old = found.get(choice.index, {"text": "", "token_ids": [], "num_scored": 0})
            given: Any = choice
            new = _seen(given, old["text"] + given.text, old["token_ids"] + given.token_ids)
            new["num_scored"] = old["num_scored"] + len(given.logprobs.tokens)
            found[choice.index] = new
    return found


def _seen(choice: Any, text: str, token_ids: list[int]) -> dict[str, Any]:
    reason = getattr(choice, "stop_reason", None)
    return {"text": text, "token_ids": token_ids, "finish_reason": choice.finish_reason, "stop_reason": reason}


def test_a_request_that_was_stopped_leaves_the_engine(server: RunningServer, llm: LLM) -> None:
    text = llm.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True), use_tqdm=False)
    stop = text[0].outputs[0].text[3:6]
    call = options() | {"temperature": 0, "stop": stop, "max_tokens": 200, "seed": None}
    answer = server.client().completions.create(**call)
    assert answer.choices[0].finish_reason == "stop"
    assert server.wait_idle()["num_running"] == 0
