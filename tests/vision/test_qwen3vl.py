"""Qwen3-VL reads images of any size: sizes, logits and positions equal those of transformers, through `LLM`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from test_gemma3 import GREEDY, PROMPTS, SIZES, assert_equal_to_transformers
from vision_models import VisionModel, picture, qwen3_5_model, qwen3_vl_model, qwen3_vl_moe_model

from bifolio import LLM
from bifolio.images import PromptImage, rope_positions, shift_at
from bifolio.model.loader import open_text_model

pytestmark = pytest.mark.full  # they compare with transformers and its processors


@pytest.mark.full
@pytest.mark.parametrize(("make", "kernels", "chunk_size"), [
    (qwen3_vl_model, "native", 7), (qwen3_vl_model, "reference", 64), (qwen3_vl_moe_model, "native", 64),
    (qwen3_5_model, "native", 7), (qwen3_5_model, "native", 512), (qwen3_5_model, "reference", 64),
])  # fmt: skip
def test_logits_equal_transformers(make: Callable[[], VisionModel], kernels: str, chunk_size: int) -> None:
    model = make()
    sizes = {**SIZES, "num_blocks": 300, "max_model_len": 600}
    with LLM(model.folder, kernels=kernels, chunk_size=chunk_size, **sizes) as llm:
        for text, shapes in PROMPTS.values():
            shapes = [(min(width, 90), max(height, 20)) for width, height in shapes]
            images = [picture(*shape, seed=number) for number, shape in enumerate(shapes)]
            assert_equal_to_transformers(model, llm, text.format(model.place), images)
        assert_equal_to_transformers(model, llm, "text alone", [])


@pytest.mark.full
def test_two_hundred_sizes_are_those_of_the_processor() -> None:
    """Pixels, order of patches and numbers of tokens, bit by bit."""
    from bifolio.model.vision.families.qwen3vl import QwenVision
    from bifolio.model.vision.tower import Cut

    model, rng = qwen3_vl_model(), np.random.default_rng(5)
    vision = open_text_model(model.folder).vision
    assert isinstance(vision, QwenVision)
    cut = Cut(8, vision.normalisation.values, 2)
    for seed in range(200):
        width, height = (int(2 ** rng.uniform(3.4, 9)) for _ in range(2))
        image = picture(width, height, seed)
        expected = model.processor.image_processor([image], return_tensors="np")
        found = vision.read(image)
        pixels = found.tiles[0]
        rows, columns = expected["image_grid_thw"][0, 1:].tolist()
        assert (rows * 8, columns * 8) == pixels.shape[:2]
        ours = cut.patches(pixels, cut.values).reshape(-1, 3, 1, 64)
        theirs = np.asarray(expected["pixel_values"]).reshape(-1, 3, 2, 64)
        np.testing.assert_array_equal(np.repeat(ours, 2, axis=2), theirs)
        assert len(found.text) == len("<|image_pad|>") * rows * columns // 4


@pytest.mark.full
def test_a_second_turn_computes_no_image_again() -> None:
    model = qwen3_vl_model()
    sizes = {**SIZES, "num_blocks": 300, "max_model_len": 600}
    content = [{"type": "image", "image": picture(70, 60)}, {"type": "text", "text": "Hi"}]
    turns = [{"role": "user", "content": content}, {"role": "assistant", "content": "Yes"}]
    turns.append({"role": "user", "content": "And now?"})
    with LLM(model.folder, **sizes) as llm:
        llm.chat(turns[:1], GREEDY)
        reader = llm.engine.runner.images
        assert reader is not None
        computed = reader.num_rows
        (warm,) = llm.chat(turns, GREEDY)
        assert reader.num_rows == computed
        assert warm.metrics.num_cached_tokens >= computed
    with LLM(model.folder, enable_prefix_caching=False, **sizes) as cold:
        (again,) = cold.chat(turns, GREEDY)
    assert again.outputs[0].token_ids == warm.outputs[0].token_ids
    assert again.outputs[0].logprobs == warm.outputs[0].logprobs


def test_positions_by_hand() -> None:
    """Two tokens of text, an image of 2 x 3, one token, an image of 1 x 1, text."""
    grids = ((2, (2, 3)), (9, (1, 1)))
    images = [
        PromptImage(np.zeros((1, 1, 3), np.uint8), np.arange(start, start + h * w, dtype=np.int32), b"", False, (h, w))
        for start, (h, w) in grids
    ]
    expected = [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 7, 8],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7, 8],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 8],
    ]
    assert rope_positions(images, 0, 12).tolist() == expected
    for start in range(12):
        assert rope_positions(images, start, 12).tolist() == [row[start:] for row in expected]
    assert [shift_at(images, index) for index in (0, 8, 11)] == [0, -3, -3]


@pytest.mark.full
def test_experts_that_are_stored_transposed_are_the_same(tmp_path: Path) -> None:
    """As folders of the hub store them."""
    from safetensors.numpy import load_file, save_file

    model = qwen3_vl_moe_model()
    shutil.copytree(model.folder, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    for name, tensor in tensors.items():
        if ".mlp.experts." in name:
            tensors[name] = np.ascontiguousarray(tensor.transpose(0, 2, 1))
    save_file(tensors, tmp_path / "model.safetensors")
    with LLM(tmp_path, **SIZES) as llm:
        assert_equal_to_transformers(model, llm, f"{model.place} and text", [picture(50, 40)])
