"""Images on the Triton kernels: rows of a tower enter chunks, captured steps continue behind them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "vision"))
pytest.importorskip("PIL")

from bifolio.engine.tile_passes import TilePasses
from bifolio.kernels.reference import ReferenceKernels
from bifolio.kernels.triton import TritonKernels
from bifolio.sampling_params import SamplingParams
from built_engines import built_engine
from image_requests import (
    PROMPTS,
    SIZES,
    assert_greedy,
    drain,
    loaded,
    outputs_of,
    prompt_of,
    second_turn,
    worst_error,
)

TILES = [(32, 48, 3), (48, 32, 3), (32, 48, 3), (48, 32, 3), (32, 48, 3)]
FEW = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=1)


@pytest.mark.parametrize("name", ["gemma3", "qwen3_vl", "qwen3_5", "gemma4", "gemma4_large"])
def test_tokens_and_logprobs_equal_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image beside text, in chunks; a second turn behind it reads positions and places that differ."""
    engine = built_engine(loaded(name), kernels=TritonKernels("cpu", "f32"), **SIZES)
    assert engine.slots.device is not None
    requests = {}
    for key in ("image", "text"):
        text, numbers = PROMPTS[key]
        prompt = prompt_of(name, text, numbers)
        requests[key] = engine.add_request(key, prompt.token_ids, FEW, images=prompt.images)
    drain(engine)
    for key, request in requests.items():
        assert request.error is None
        assert worst_error(name, key, request)[0] < 2e-3
        assert_greedy(name, key, request)
    device, captured = engine.slots.device, []
    launch = device.prompt_logits

    def counted(*arguments: Any) -> Any:
        captured.append(launch(*arguments))
        return captured[-1]

    monkeypatch.setattr(device, "prompt_logits", counted)
    turn = second_turn(engine, name, requests["image"])
    assert [logits is not None for logits in captured] == [True]
    reference = built_engine(loaded(name), kernels=ReferenceKernels(), **SIZES)
    whole = reference.add_request("whole", turn.prompt_token_ids, turn.params, images=turn.images)
    drain(reference)
    assert turn.sequences[0].output_token_ids == whole.sequences[0].output_token_ids


@pytest.mark.parametrize("name", ["qwen3_vl", "mistral3"])
def test_chunks_with_images_are_captured_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of an image run beside decodes of a text, and those steps serve prompts without images in between."""
    sizes = {**SIZES, "token_budget": 24, "chunk_size": 20}
    found: dict[str, list[Any]] = {}
    for kind, kernels in (("triton", TritonKernels("cpu", "f32")), ("reference", ReferenceKernels())):
        engine, passes = built_engine(loaded(name), kernels=kernels, **sizes), []
        device = engine.slots.device
        if device is not None:
            launch = device.prompt_logits

            def counted(batch: Any, slots: Any, launch: Any = launch, passes: list[bool] = passes) -> Any:
                logits = launch(batch, slots)
                if batch.given is not None:
                    passes.append(logits is not None)
                return logits

            monkeypatch.setattr(device, "prompt_logits", counted)
        requests = []
        for key in ("text", "image", "text"):
            text, numbers = PROMPTS[key]
            prompt = prompt_of(name, text, numbers)
            requests.append(engine.add_request(f"{key} {len(requests)}", prompt.token_ids, FEW, images=prompt.images))
            engine.step()
            engine.step()
        drain(engine)
        assert kind == "reference" or (passes and all(passes))
        found[kind] = [outputs_of(request) for request in requests]
    assert found["triton"] == found["reference"]


def test_a_size_that_comes_again_is_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows are those of the pass kernel by kernel, also when tiles of other sizes came in between."""
    kernels, tower = TritonKernels("cpu", "f32"), loaded("qwen3_vl").tower
    assert tower is not None
    tower = tower.prepared(kernels.for_towers)
    passes, captured = TilePasses(tower, kernels), []
    capture = kernels.capture

    def counted(run: Any, x: Any) -> Any:
        captured.append(tuple(x.shape))
        return capture(run, x)

    monkeypatch.setattr(kernels, "capture", counted)
    tiles = [np.random.default_rng(seed).integers(0, 256, size, np.uint8) for seed, size in enumerate(TILES)]
    found = [passes.rows(tile) for tile in tiles]
    assert captured == [TILES[0], TILES[1]]
    for tile, rows in zip(tiles, found, strict=True):
        expected = TilePasses(tower, kernels).rows(tile)
        np.testing.assert_array_equal(kernels.to_host(rows), kernels.to_host(expected))
    few = TilePasses(tower, kernels, most_bytes=1)
    for tile in tiles[:4]:
        few.rows(tile)
    assert len(captured) == 2
