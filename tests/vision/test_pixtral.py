"""Mistral 3 reads images: processing, logits and prefixes equal those of transformers, through `LLM`."""

from __future__ import annotations

import numpy as np
import pytest
from later_models import mistral3_model
from test_gemma3 import GREEDY, PROMPTS, SIZES, assert_equal_to_transformers
from vision_models import picture, values_of

from bifolio import LLM
from bifolio.model.loader import open_text_model
from bifolio.model.vision.families.pixtral import PixtralVision

pytestmark = pytest.mark.full  # they compare with transformers and its processors

LARGE = {**SIZES, "num_blocks": 300, "max_model_len": 600}


@pytest.mark.parametrize(("kind", "kernels", "chunk_size"), [
    ("mistral", "native", 7), ("mistral", "reference", 64), ("ministral3", "native", 512),
])  # fmt: skip
def test_logits_equal_transformers(kind: str, kernels: str, chunk_size: int) -> None:
    model = mistral3_model(kind)
    with LLM(model.folder, kernels=kernels, chunk_size=chunk_size, **LARGE) as llm:
        for text, sizes in PROMPTS.values():
            images = [picture(*size, seed=number) for number, size in enumerate(sizes)]
            assert_equal_to_transformers(model, llm, text.format(model.place), images)
        assert_equal_to_transformers(model, llm, "text alone", [])


def test_a_second_turn_computes_no_image_again() -> None:
    model = mistral3_model()
    content = [{"type": "image", "image": picture(70, 60)}, {"type": "text", "text": "Hi"}]
    turns = [{"role": "user", "content": content}, {"role": "assistant", "content": "Yes"}]
    turns.append({"role": "user", "content": "And now?"})
    with LLM(model.folder, **LARGE) as llm:
        llm.chat(turns[:1], GREEDY)
        reader = llm.engine.runner.images
        assert reader is not None
        assert reader.num_rows == 6 * 5
        (warm,) = llm.chat(turns, GREEDY)
        assert reader.num_rows == 6 * 5
        assert warm.metrics.num_cached_tokens >= 6 * 5
    with LLM(model.folder, enable_prefix_caching=False, **LARGE) as cold:
        (again,) = cold.chat(turns, GREEDY)
    assert again.outputs[0].token_ids == warm.outputs[0].token_ids
    assert again.outputs[0].logprobs == warm.outputs[0].logprobs


def test_two_hundred_images_are_those_of_the_processor() -> None:
    """Sizes and values, bit by bit."""
    model, rng = mistral3_model(), np.random.default_rng(5)
    vision = open_text_model(model.folder).vision
    assert isinstance(vision, PixtralVision)
    for seed in range(200):
        image = picture(*(int(2 ** rng.uniform(3, 9)) for _ in range(2)), seed=seed)
        expected = model.processor.images([image], return_tensors="np")
        found = vision.read(image)
        (pixels,) = found.tiles
        np.testing.assert_array_equal(values_of(vision, pixels), expected["pixel_values"][0])
        lines = found.text.removesuffix("[IMG_END]").split("[IMG_BREAK]")
        assert (12 * len(lines), 12 * lines[0].count("[IMG]")) == tuple(expected["image_sizes"][0])


def test_the_largest_image_is_one_that_the_processor_makes() -> None:
    vision = open_text_model(mistral3_model().folder).vision
    assert isinstance(vision, PixtralVision)
    assert vision.largest(10_000) == (96, 96)
    assert vision.largest(30) == (60, 60)
    assert vision.fitting(1, 1) == (12, 12)
