"""`LLM.generate` with a suffix: the model fills the gap, and a mark ends the output."""

from __future__ import annotations

import asyncio

import pytest

from bifolio import LLM, AsyncLLM, BeamSearchParams, SamplingParams
from bifolio.errors import RequestError
from bifolio.sequence import FinishReason
from helpers import tiny_folder
from infill_models import infill_folder

PROMPT = {"prompt": "Once upon", "suffix": " a quiet wood."}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(infill_folder(), max_model_len=256, num_blocks=64, kernels="reference")


def test_a_gap_is_filled(llm: LLM) -> None:
    output = llm.generate(PROMPT, GREEDY)[0]
    marks = llm.model.require_infill()
    tokens = marks.prompt(llm.model.require_tokenizer(), "Once upon", " a quiet wood.")
    assert output.prompt == "Once upon"
    assert output.prompt_token_ids == tokens
    assert output.outputs[0].token_ids == llm.generate(tokens, GREEDY)[0].outputs[0].token_ids
    assert llm.generate("Once upon", GREEDY)[0].outputs[0].token_ids != output.outputs[0].token_ids
    ids = llm.model.require_tokenizer().encode("Once upon")
    assert llm.generate({"prompt_token_ids": ids, "suffix": PROMPT["suffix"]}, GREEDY)[0].prompt_token_ids == tokens


def test_a_mark_ends_the_output(llm: LLM) -> None:
    marks = llm.model.require_infill()
    push = SamplingParams(temperature=0.0, max_tokens=12, logit_bias={marks.ends[4]: 1000.0})
    for output in (llm.generate(PROMPT, push)[0], asyncio.run(awaited(push)), llm.beam_search(PROMPT, beams(push))[0]):
        assert output.outputs[0].token_ids == [marks.ends[4]]
        assert output.outputs[0].text == ""
        assert output.outputs[0].finish_reason == "stop"
    (*_, last) = llm.stream(PROMPT, push)
    assert last.finish_reason is FinishReason.STOP
    assert len(llm.generate("Once upon", push)[0].outputs[0].token_ids) == 12  # no gap: a token as any other
    endless = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logit_bias={marks.ends[4]: 1000.0})
    assert len(llm.generate(PROMPT, endless)[0].outputs[0].token_ids) == 12


def beams(params: SamplingParams) -> BeamSearchParams:
    return BeamSearchParams(beam_width=2, num_return_sequences=1, max_tokens=12, logit_bias=params.logit_bias)


async def awaited(params: SamplingParams):  # type: ignore[no-untyped-def]
    async with AsyncLLM(infill_folder(), max_model_len=256, num_blocks=64, kernels="reference") as llm:
        return (await llm.generate(PROMPT, params))[0]


def test_a_model_without_marks_says_so() -> None:
    llm = LLM(tiny_folder(tokenizer=True), max_model_len=128, num_blocks=64, kernels="reference")
    with pytest.raises(RequestError, match=r"cannot fill in the middle.*leave the suffix out, or use a model such as"):
        llm.generate(PROMPT, GREEDY)


def test_keys_of_a_prompt_are_checked(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"no 'sufix'.*suffix"):
        llm.generate({"prompt": "Once", "sufix": "x"}, GREEDY)
    with pytest.raises(RequestError, match="no 'negative_prompt': it has prompt, prompt_token_ids, suffix"):
        llm.generate({"prompt": "Once", "negative_prompt": "Twice"}, GREEDY)
    with pytest.raises(RequestError, match="suffix of a prompt is text, not 5"):
        llm.generate({"prompt": "Once", "suffix": 5}, GREEDY)
