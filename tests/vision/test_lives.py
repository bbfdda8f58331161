"""Random lives of requests with images: n, beams, drafts, preemptions, forks, aborts and prefix hits change no output.

Each request runs alone in a fresh engine, and among others in a crowded one: tokens and logprobs are equal bit by bit.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vision_models import VisionModel, gemma3_model, picture, qwen3_vl_model

from bifolio import LLM, SamplingParams
from bifolio.beam_params import BeamSearchParams
from bifolio.config import SpeculativeConfig
from bifolio.errors import RequestError
from bifolio.prompts import PromptTokens

pytestmark = pytest.mark.full  # they compare with transformers and its processors

MODELS = {"gemma3": gemma3_model, "qwen3_vl": qwen3_vl_model}
SIZES = {"block_size": 4, "max_model_len": 160, "max_num_seqs": 5}
TEXTS = ("", "one", "one two three four five")
PIXELS = [picture(34 + 9 * seed, 40, seed) for seed in range(3)]
TOKENS = 6


@st.composite
def prompts(draw: st.DrawFn) -> tuple[tuple[int | str, ...], str, int]:
    """(Texts and numbers of pictures, kind of request, seed)."""
    parts = draw(st.lists(st.sampled_from([*TEXTS, 0, 0, 1, 2]), min_size=1, max_size=4))
    kind = draw(st.sampled_from(["greedy", "drawn", "n", "beams", "abort"]))
    return tuple(parts), kind, draw(st.integers(0, 3))


def prompt_of(llm: LLM, model: VisionModel, parts: tuple[int | str, ...]) -> PromptTokens:
    text = "a" + "".join(model.place if isinstance(part, int) else part for part in parts)
    images = [PIXELS[part] for part in parts if isinstance(part, int)]
    return llm.prompt_tokens({"prompt": text, "multi_modal_data": {"image": images} if images else None})


def params_of(kind: str, seed: int) -> Any:
    if kind == "beams":
        return BeamSearchParams(beam_width=2, max_tokens=TOKENS, ignore_eos=True)
    temperature = 0.0 if kind == "greedy" else 1.0
    return SamplingParams(temperature=temperature, seed=seed, n=2 if kind == "n" else 1, max_tokens=TOKENS,
                          ignore_eos=True, logprobs=1)  # fmt: skip


def output_of(request: Any) -> Any:
    return [
        (sequence.output_token_ids, [(each.token_id, each.logprob) for each in sequence.logprobs], sequence.score)
        for sequence in request.sequences
    ]


@cache
def alone(name: str, parts: tuple[int | str, ...], kind: str, seed: int) -> Any:
    """The output of a request in an engine of its own."""
    model = MODELS[name]()
    with LLM(model.folder, num_blocks=120, chunk_size=512, enable_prefix_caching=False, **SIZES) as llm:
        prompt = prompt_of(llm, model, parts)
        request = llm.engine.add_request("only", prompt.token_ids, params_of(kind, seed), images=prompt.images)
        while llm.engine.has_work:
            llm.engine.step()
        return output_of(request)


def check_life(name: str, lives: list[Any], chunk_size: int, num_blocks: int, drafts: bool, gap: int) -> None:
    model = MODELS[name]()
    speculative = SpeculativeConfig(length=3, adaptive=False) if drafts else None
    llm = LLM(model.folder, num_blocks=num_blocks, chunk_size=chunk_size, speculative=speculative, **SIZES)
    engine, requests, waiting = llm.engine, {}, list(enumerate(lives))
    steps = 0
    while waiting or engine.has_work:
        if waiting and (steps % gap == 0 or not engine.has_work):
            number, (parts, kind, seed) = waiting.pop(0)
            prompt = prompt_of(llm, model, parts)
            requests[number] = engine.add_request(
                str(number), prompt.token_ids, params_of(kind, seed), images=prompt.images
            )
        engine.step()
        steps += 1
        assert steps < 4000
        for number, (_, kind, _) in enumerate(lives):
            if kind == "abort" and number in requests and steps % 5 == 0:
                engine.abort(str(number))
    engine.blocks.check_invariants()
    assert engine.blocks.num_used_blocks == 0
    for number, (parts, kind, seed) in enumerate(lives):
        assert requests[number].error is None
        if kind != "abort":
            assert output_of(requests[number]) == alone(name, parts, kind, seed), (number, lives[number])
    llm.close()


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(st.lists(prompts(), min_size=2, max_size=6), st.sampled_from([3, 16, 64]), st.sampled_from([70, 140]),
       st.booleans(), st.integers(1, 4))  # fmt: skip
def test_requests_with_images_are_as_alone(
    name: str, lives: list[Any], chunk_size: int, num_blocks: int, drafts: bool, gap: int
) -> None:
    check_life(name, lives, chunk_size, num_blocks, drafts, gap)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=700, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(prompts(), min_size=2, max_size=6), st.sampled_from([3, 16, 64]), st.sampled_from([70, 140]),
       st.booleans(), st.integers(1, 4))  # fmt: skip
def test_three_thousand_lives_with_images(
    name: str, lives: list[Any], chunk_size: int, num_blocks: int, drafts: bool, gap: int
) -> None:
    check_life(name, lives, chunk_size, num_blocks, drafts, gap)


@pytest.mark.full
def test_a_kept_conversation_continues_behind_its_image() -> None:
    """A fork shares the blocks of the image and has its positions."""
    for name, make in MODELS.items():
        model = make()
        with LLM(model.folder, num_blocks=120, **SIZES) as llm:
            engine, prompt = llm.engine, prompt_of(llm, model, (0, "one"))
            params = params_of("greedy", 0)
            parent = engine.add_request("parent", prompt.token_ids, params, images=prompt.images)
            engine.keep("parent")
            while engine.has_work:
                engine.step()
            more = [5, 6, 7]
            branch = engine.fork("parent", "branch", more, params)
            while engine.has_work:
                engine.step()
            engine.release("parent")
            tokens = [*parent.sequences[0].token_ids, *more]
        with LLM(model.folder, num_blocks=120, enable_prefix_caching=False, **SIZES) as llm:
            whole = llm.engine.add_request("whole", tokens, params, images=prompt.images)
            while llm.engine.has_work:
                llm.engine.step()
        assert output_of(branch) == output_of(whole), name


@pytest.mark.full
def test_a_fork_keeps_images_as_a_whole() -> None:
    """Of the first tokens of a conversation; a cut inside an image is refused."""
    model = gemma3_model()
    with LLM(model.folder, num_blocks=120, **SIZES) as llm:
        engine, prompt, params = llm.engine, prompt_of(llm, model, ("one", 0, "two")), params_of("greedy", 0)
        parent = engine.add_request("parent", prompt.token_ids, params, images=prompt.images)
        engine.keep("parent")
        while engine.has_work:
            engine.step()
        (image,) = prompt.images
        with pytest.raises(RequestError, match=f"keep {image.start} tokens, or {image.end}, as a whole"):
            engine.fork("parent", "cut", [5], params, num_kept=image.start + 3)
        found = [
            engine.fork("parent", f"keeps {count}", [5], params, num_kept=count) for count in (image.start, image.end)
        ]
        while engine.has_work:
            engine.step()
        assert [len(request.images) for request in found] == [0, 1]
        assert parent.error is None
        engine.release("parent")
