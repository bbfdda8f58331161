"""Encoders on the Triton kernels, in the interpreter: windows in both directions, and biases by distance."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "encoders"))

from encoder_models import encoder_model

from bifolio import LLM
from bifolio.kernels.triton import TritonKernels
from bifolio.kernels.triton.attention import Attention

TEXTS = [[2, 7, 9, 3], [2, *range(5, 24), 3], [8]]


def vectors(name: str, kernels: Any, texts: list[list[int]], **options: Any) -> list[np.ndarray]:
    with LLM(
        encoder_model(name)[1], kernels=kernels, max_model_len=32, max_num_seqs=4, num_blocks=32, **options
    ) as llm:
        return [result.outputs.data for result in llm.embed(texts, use_tqdm=False)]


@pytest.mark.parametrize("name", ["mpnet", "modernbert"])
def test_vectors_are_those_of_the_reference(name: str) -> None:
    expected = vectors(name, "reference", TEXTS)
    np.testing.assert_allclose(vectors(name, TritonKernels("cpu", "f32"), TEXTS), expected, atol=1e-5)


def test_padded_steps_of_fixed_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that a GPU captures, one after the other: texts of an earlier step stay behind those of a smaller one."""
    staged: list[int] = []
    stage = Attention.stage_texts

    def spy(self: Attention, segment: Any, tiles: Any) -> None:
        staged.append(segment.token_end)
        stage(self, segment, tiles)

    monkeypatch.setattr(Attention, "stage_texts", spy)
    steps = [[[2, *range(5, 15), 3], [2, 7, 9, 3], [8]], [[2, 9, 11, 3], [7]], TEXTS, [[2, 6, 3]], [[4]] * 4]
    for name in ("bert", "modernbert"):
        folder, expected = encoder_model(name)[1], [vectors(name, "reference", texts) for texts in steps]
        staged.clear()
        with LLM(
            folder, kernels=TritonKernels("cpu", "f32"), max_model_len=32, max_num_seqs=4, num_blocks=32, warm_up=False
        ) as llm:
            for texts, wanted in zip(steps, expected, strict=True):
                found = [result.outputs.data for result in llm.embed(texts, use_tqdm=False)]
                np.testing.assert_allclose(found, wanted, atol=1e-5)
        assert staged == [24, 8, 8]  # 26 tokens, and four texts, are more than a step of fixed size holds


def test_steps_in_flight_keep_their_states() -> None:
    """Steps of the same size write to one array: those that are collected later have their own numbers."""
    folder, texts = encoder_model("bert")[1], [[2, *range(5, 20), 3], [2, *range(20, 5, -1), 3], [2, 7, 7, 7, 3]]
    sizes: dict[str, Any] = {"max_model_len": 24, "max_num_seqs": 4, "num_blocks": 32, "token_budget": 24}
    found = []
    for kernels in ("reference", TritonKernels("cpu", "f32")):
        with LLM(folder, kernels=kernels, warm_up=False, **sizes) as llm:
            found.append([result.outputs.data for result in llm.encode(texts, use_tqdm=False)])
    for own, expected in zip(*found, strict=True):
        np.testing.assert_allclose(own, expected, atol=1e-4)


def test_deterministic_vectors_have_the_same_bits_alone() -> None:
    options = {"deterministic": True, "dtype": "f16"}
    together, alone = (
        vectors("mpnet", TritonKernels("cpu", "f16", deterministic=True), texts, **options)
        for texts in (TEXTS, TEXTS[:1])
    )
    assert together[0].tobytes() == alone[0].tobytes()
