"""SmolVLM and Idefics3 read images in tiles: pixels, text and logits equal those of transformers, through `LLM`."""

from __future__ import annotations

import numpy as np
import pytest
from test_gemma3 import PROMPTS, SIZES, assert_equal_to_transformers
from vision_models import idefics3_model, picture, values_of

from bifolio import LLM
from bifolio.model.loader import open_text_model
from bifolio.model.vision.families.idefics3 import buckets

pytestmark = pytest.mark.full  # they compare with transformers and its processors

LARGE = {**SIZES, "num_blocks": 400, "max_model_len": 900}


@pytest.mark.full
@pytest.mark.parametrize(("kind", "kernels", "chunk_size"), [
    ("SmolVLM", "native", 512), ("SmolVLM", "native", 7), ("SmolVLM", "reference", 64), ("Idefics3", "native", 64),
])  # fmt: skip
def test_logits_equal_transformers(kind: str, kernels: str, chunk_size: int) -> None:
    model = idefics3_model(kind)
    with LLM(model.folder, kernels=kernels, chunk_size=chunk_size, **LARGE) as llm:
        for text, shapes in PROMPTS.values():
            images = [picture(*shape, seed=number) for number, shape in enumerate(shapes)]
            assert_equal_to_transformers(model, llm, text.format(model.place), images)


@pytest.mark.full
def test_two_hundred_images_are_cut_as_the_processor_does() -> None:
    model, rng = idefics3_model(), np.random.default_rng(5)
    vision = open_text_model(model.folder).vision
    assert vision is not None
    for seed in range(200):
        image = picture(*(int(2 ** rng.uniform(2, 9)) for _ in range(2)), seed=seed)
        expected = model.processor.image_processor([image], return_tensors="np")
        found = vision.read(image)
        values = np.stack([values_of(vision, tile) for tile in found.tiles])
        np.testing.assert_array_equal(values, expected["pixel_values"][0])
        inputs = {name: expected[name] for name in ("rows", "cols")}
        assert found.text == model.processor.replace_image_token(inputs, 0)


def test_positions_are_those_of_transformers() -> None:
    """By fractions in f32, which are not always the number of the patch."""
    import torch

    for side in (6, 14, 26, 27, 32, 64):
        boundaries = torch.arange(1 / side, 1.0, 1 / side)
        places = torch.arange(side, dtype=torch.float32) * (1.0 / torch.tensor([side]))
        expected = torch.bucketize(torch.clamp(places, max=1.0 - 1e-6), boundaries, right=True)
        assert buckets(side).tolist() == expected.tolist(), side
