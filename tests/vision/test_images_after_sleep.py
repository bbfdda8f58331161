"""Weights that are read again after sleep take the rows of images as those before did."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from later_models import gemma4_model
from vision_models import VisionModel, gemma3_model, picture, qwen3_vl_model

from bifolio import LLM, SamplingParams

PARAMS = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=1)


@pytest.mark.full
@pytest.mark.parametrize("make", [gemma3_model, gemma4_model, qwen3_vl_model])
@pytest.mark.parametrize("level", [1, 2])
def test_answers_about_an_image_are_those_before_sleep(make: Callable[[], VisionModel], level: int) -> None:
    content = [{"type": "image", "image": picture(70, 30, 1)}, {"type": "text", "text": "What is it?"}]
    with LLM(str(make().folder), block_size=4, num_blocks=100, max_model_len=200) as llm:
        prompt = llm.chat_prompt([{"role": "user", "content": content}])
        [before] = llm.generate(prompt, PARAMS)
        llm.sleep(level)
        llm.wake_up()
        [after] = llm.generate(prompt, PARAMS)
        assert after.error is None
        assert after.outputs[0].logprobs == before.outputs[0].logprobs
