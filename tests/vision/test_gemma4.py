"""Gemma 4 reads images: processing, logits and prefixes equal those of transformers, through `LLM`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from later_models import gemma4_large_model, gemma4_model, gemma4_unified_model
from test_gemma3 import GREEDY, PROMPTS, SIZES, assert_equal_to_transformers
from vision_models import VisionModel, picture

from bifolio import LLM
from bifolio.errors import RequestError
from bifolio.model.loader import load_model, open_text_model
from bifolio.model.vision.families.gemma4 import Gemma4Tower, Gemma4Vision
from bifolio.model.vision.layers import Clipped
from bifolio.model.vision.tower import Cut

pytestmark = pytest.mark.full  # they compare with transformers and its processors

LARGE = {**SIZES, "num_blocks": 300, "max_model_len": 600}


@pytest.mark.parametrize(("make", "kernels", "chunk_size"), [
    (gemma4_model, "native", 7), (gemma4_model, "reference", 64), (gemma4_large_model, "native", 7),
    (gemma4_large_model, "native", 512), (gemma4_large_model, "reference", 64), (gemma4_unified_model, "native", 64),
])  # fmt: skip
def test_logits_equal_transformers(make: Callable[[], VisionModel], kernels: str, chunk_size: int) -> None:
    model = make()
    with LLM(model.folder, kernels=kernels, chunk_size=chunk_size, **LARGE) as llm:
        for text, sizes in PROMPTS.values():
            images = [picture(*size, seed=number) for number, size in enumerate(sizes)]
            assert_equal_to_transformers(model, llm, text.format(model.place), images)
        assert_equal_to_transformers(model, llm, "text alone", [])


@pytest.mark.parametrize("make", [gemma4_model, gemma4_large_model, gemma4_unified_model])
def test_a_second_turn_computes_no_image_again(make: Callable[[], VisionModel]) -> None:
    model = make()
    content = [{"type": "image", "image": picture(70, 60)}, {"type": "text", "text": "Hi"}]
    turns = [{"role": "user", "content": content}, {"role": "assistant", "content": "Yes"}]
    turns.append({"role": "user", "content": "And now?"})
    with LLM(model.folder, **LARGE) as llm:
        llm.chat(turns[:1], GREEDY)
        reader = llm.engine.runner.images
        assert reader is not None
        computed = reader.num_rows
        assert 0 < computed <= 70
        (warm,) = llm.chat(turns, GREEDY)
        assert reader.num_rows == computed
        assert warm.metrics.num_cached_tokens >= computed
    with LLM(model.folder, enable_prefix_caching=False, **LARGE) as cold:
        (again,) = cold.chat(turns, GREEDY)
    assert again.outputs[0].token_ids == warm.outputs[0].token_ids
    assert again.outputs[0].logprobs == warm.outputs[0].logprobs


def test_bounds_of_products_are_those_of_the_folder() -> None:
    """Different bounds of the inputs of q, k and v, one for each matrix."""
    tower = load_model(gemma4_model().folder).tower
    assert isinstance(tower, Gemma4Tower)
    products = [product for layer in tower.layers for product in (layer.qkv, layer.output, layer.up, layer.down)]
    assert all(isinstance(product, Clipped) for product in products)
    assert [len(product.parts) for product in products[:4]] == [3, 1, 2, 1]  # type: ignore[union-attr]


@pytest.mark.parametrize("make", [gemma4_model, gemma4_unified_model])
def test_two_hundred_images_are_those_of_the_processor(make: Callable[[], VisionModel]) -> None:
    """Sizes, values, places and numbers of tokens, bit by bit."""
    model, rng = make(), np.random.default_rng(5)
    vision = open_text_model(model.folder).vision
    assert isinstance(vision, Gemma4Vision)
    size = vision.sizes.patch_size
    for seed in range(200):
        image = picture(*(int(2 ** rng.uniform(1, 9)) for _ in range(2)), seed=seed)
        expected = model.processor.image_processor([image], return_tensors="pt")
        found = vision.read(image)
        (pixels,) = found.tiles
        cut = Cut(size, vision.normalisation.values)
        values = cut.patches(pixels, cut.values)
        places = np.asarray(expected["image_position_ids"])[0]
        theirs = np.asarray(expected["pixel_values"])[0][: len(values)].reshape(-1, size, size, 3)
        np.testing.assert_array_equal(values, theirs.transpose(0, 3, 1, 2).reshape(len(values), -1))
        np.testing.assert_array_equal(np.stack(vision.places(*pixels.shape[:2]), axis=1), places[: len(values)])
        assert (places[len(values) :] == -1).all()
        assert found.text.count("<|image|>") == int(expected["num_soft_tokens_per_image"][0])


def test_a_line_of_pixels_has_as_many_rows_as_the_model_takes() -> None:
    vision = open_text_model(gemma4_model().folder).vision
    assert isinstance(vision, Gemma4Vision)
    assert vision.fitting(1, 100_000) == (12, 70 * 12)
    assert vision.fitting(100_000, 1) == (70 * 12, 12)
    assert vision.num_rows(np.zeros((*vision.largest(50), 3), np.uint8)) == 50
    assert vision.num_rows(np.zeros((*vision.largest(900), 3), np.uint8)) == 70
    with pytest.raises(RequestError, match="has no pixels"):
        vision.read(picture(0, 4))
