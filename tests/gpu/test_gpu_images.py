"""Images on a GPU: the tower runs on the device, its rows enter prompt chunks, and captured steps continue behind them.

transformers and its processors are the oracle. Pillow is needed beside the modules of the other tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("PIL")

from bifolio.config import SpeculativeConfig
from bifolio.kernels.reference import ReferenceKernels
from built_engines import built_engine
from image_requests import (
    GREEDY,
    KINDS,
    MODELS,
    SIZES,
    assert_greedy,
    loaded,
    outputs_of,
    prompt_of,
    run_prompts,
    scores_of,
    second_turn,
    worst_error,
)

NewEngine = Callable[..., Any]
F32_ERROR = 2e-3  # of a logprob
BF16_ERROR = 0.06  # beside twice that of transformers


@pytest.mark.parametrize("with_drafts", [False, True], ids=["plain", "drafts"])
@pytest.mark.parametrize("name", MODELS)
def test_tokens_and_logprobs_equal_transformers(name: str, with_drafts: bool, new_engine: NewEngine) -> None:
    """Chunks that cut images, prompts beside decodes, a prefix hit, and a second turn behind the image."""
    drafts = SpeculativeConfig("ngram", length=2, adaptive=False) if with_drafts else None
    engine = new_engine(model=loaded(name), speculative=drafts, **SIZES)
    requests = run_prompts(engine, name)
    for key, request in requests.items():
        assert request.error is None
        assert worst_error(name, key, request)[0] < F32_ERROR, key
        assert_greedy(name, key, request)
    turn = second_turn(engine, name, requests["image"])
    again = built_engine(loaded(name), kernels=ReferenceKernels(), **SIZES)
    whole = again.add_request("whole", turn.prompt_token_ids, turn.params, images=turn.images)
    while again.has_work:
        again.step()
    assert outputs_of(turn) == outputs_of(whole)
    np.testing.assert_allclose(scores_of(turn), scores_of(whole), atol=F32_ERROR)


@pytest.mark.parametrize("name", MODELS)
def test_sixteen_bits_are_as_near_as_transformers(name: str, new_engine: NewEngine) -> None:
    engine = new_engine("bf16", model=loaded(name), **SIZES)
    for key, request in run_prompts(engine, name).items():
        assert request.error is None
        own, theirs = worst_error(name, key, request, "bf16")
        assert own < 2 * theirs + BF16_ERROR, key


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["gemma3", "qwen3_vl"])
def test_every_kind_of_request_gives_the_tokens_of_the_reference(name: str, kind: str, new_engine: NewEngine) -> None:
    expected = run_prompts(built_engine(loaded(name), kernels=ReferenceKernels(), **SIZES), name, KINDS[kind])
    found = run_prompts(new_engine(model=loaded(name), **SIZES), name, KINDS[kind])
    assert {key: outputs_of(each) for key, each in found.items()} == {
        key: outputs_of(each) for key, each in expected.items()
    }


@pytest.mark.usefixtures("own_kernels")
@pytest.mark.parametrize("name", MODELS)
def test_deterministic_requests_are_the_same_alone(name: str, gpu_kernels: Callable[..., Any]) -> None:
    """To the last bit: together with others and cut into chunks, and each alone as a whole."""
    model = loaded(name)
    options = {"kernels": gpu_kernels("f32", deterministic=True), "deterministic": True}
    together = run_prompts(built_engine(model, **options, **SIZES), name)
    from image_requests import PROMPTS

    for key, (text, numbers) in PROMPTS.items():
        engine = built_engine(model, **options, **{**SIZES, "token_budget": 512, "chunk_size": 512})
        prompt = prompt_of(name, text, numbers)
        alone = engine.add_request(key, prompt.token_ids, GREEDY, images=prompt.images)
        while engine.has_work:
            engine.step()
        assert outputs_of(alone) == outputs_of(together[key]), key
        assert scores_of(alone).tolist() == scores_of(together[key]).tolist(), key


def test_the_plan_of_memory_counts_the_tower(new_engine: NewEngine, gpu_kernels: Callable[..., Any]) -> None:
    """A measured step holds the largest image, and the rows that are kept."""
    from bifolio.config import CacheConfig, EngineConfig
    from bifolio.engine.device_memory import measure_step, move_to_device
    from bifolio.engine.images import KEPT_BYTES

    class Memory:
        def free_bytes(self) -> int:
            return 0

        def start_peak(self) -> None: ...

        def peak_bytes(self) -> int:
            return 1000

    kernels = gpu_kernels("f32")
    config = EngineConfig(CacheConfig(20, 4, "f32"), 64, 4, token_budget=32, chunk_size=32)
    for name in MODELS:
        model = move_to_device(loaded(name), kernels)
        assert model.tower is not None
        assert model.tower.prepared(kernels.for_towers) is model.tower
        assert measure_step(model, kernels, config, Memory()) == KEPT_BYTES + 1250
