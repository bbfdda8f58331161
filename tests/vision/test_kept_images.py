"""Images after a sleep of the weights, and in texts that are saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from later_models import gemma4_model
from vision_models import VisionModel, gemma3_model, picture, qwen3_5_model, qwen3_vl_model

from bifolio import LLM, SamplingParams
from bifolio.errors import SnapshotError
from helpers import tiny_loaded

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


@pytest.mark.full
@pytest.mark.parametrize("make", [gemma3_model, qwen3_vl_model, qwen3_5_model])
def test_a_saved_text_keeps_its_images(make: Callable[[], VisionModel], tmp_path: Path) -> None:
    """A branch, and the tokens of a conversation, go on in another engine: over the blocks of the images."""
    options: dict[str, Any] = {"block_size": 4, "num_blocks": 120, "max_model_len": 200}
    texts = {}
    with LLM(str(make().folder), **options) as llm:
        for seed in (1, 2):
            content = [{"type": "image", "image": picture(70, 30, seed)}, {"type": "text", "text": "What is it?"}]
            prompt = llm.chat_prompt([{"role": "user", "content": content}])
            [first] = llm.generate(prompt, PARAMS)
            llm.save(prompt, tmp_path / f"{seed}.prompt")
            with llm.open(prompt) as branch:
                branch.generate(PARAMS)
                llm.save(branch, tmp_path / f"{seed}.branch")
                texts[seed] = first.outputs[0].logprobs, branch.generate(PARAMS).outputs[0].logprobs
                with pytest.raises(SnapshotError, match="save the branch that holds them"):
                    llm.save(first, tmp_path / "none")
    assert texts[1] != texts[2]
    with LLM(str(make().folder), **options) as llm:
        for seed, expected in texts.items():
            for kind, logprobs in zip(("prompt", "branch"), expected, strict=True):
                with llm.load(tmp_path / f"{seed}.{kind}") as branch:
                    found = branch.generate(PARAMS)
                    assert found.outputs[0].logprobs == logprobs
                    assert found.metrics.num_cached_tokens >= 24
    with LLM(tiny_loaded(), **{**options, "max_model_len": 64}) as llm, pytest.raises(SnapshotError):
        llm.load(tmp_path / "1.branch")
