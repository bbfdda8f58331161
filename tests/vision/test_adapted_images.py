"""Adapters of models that read images: PEFT is the oracle, and the tower stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from later_models import mistral3_model
from vision_models import VisionModel, gemma3_model, idefics3_model, picture, qwen3_vl_model

from adapter_files import peft_adapter
from bifolio import LLM, SamplingParams
from bifolio.errors import UnsupportedModelError

PARAMS = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, logprobs=2)
TEXT = r".*(language_model|text_model).*(q_proj|up_proj|down_proj)"  # modules of the language model


@pytest.fixture(autouse=True)
def _peft() -> None:
    pytest.importorskip("peft")  # not while tests are collected: it imports transformers


def opened(model: VisionModel, adapter: Any) -> LLM:
    return LLM(model.folder, num_blocks=200, block_size=4, max_model_len=400, lora_modules={"own": str(adapter)})


@pytest.mark.full
@pytest.mark.parametrize("make", [gemma3_model, idefics3_model, mistral3_model, qwen3_vl_model])
def test_answers_about_an_image_are_those_of_peft(make: Callable[[], VisionModel]) -> None:
    import torch

    model, image = make(), picture(70, 30, 1)
    adapted, folder = peft_adapter(model.model, target_modules=TEXT)
    text = f"Look: {model.place} what?"
    with torch.no_grad():
        logits = adapted(**model.inputs(text, [image])).logits[0, -1].double().numpy()
    expected = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
    prompt = {"prompt": text, "multi_modal_data": {"image": image}}
    with opened(model, folder) as llm:
        [plain] = llm.generate(prompt, PARAMS)
        [found] = llm.generate(prompt, PARAMS, lora_request="own")
    assert found.outputs[0].logprobs[0] != plain.outputs[0].logprobs[0]
    for token, one in found.outputs[0].logprobs[0].items():
        assert abs(expected[token] - one.logprob) < 1e-4


@pytest.mark.full
@pytest.mark.parametrize("make", [gemma3_model, idefics3_model, mistral3_model, qwen3_vl_model])
def test_an_adapter_of_the_tower_is_refused_by_name(make: Callable[[], VisionModel]) -> None:
    model = make()
    _, folder = peft_adapter(model.model, target_modules="all-linear")
    with pytest.raises(UnsupportedModelError, match="belongs to the tower that reads images"):
        opened(model, folder)
