"""Gemma 3 reads images: processing, logits and prefixes equal those of transformers, through `LLM`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from vision_models import VisionModel, gemma3_model, picture

from bifolio import LLM, SamplingParams
from bifolio.errors import RequestError

pytestmark = pytest.mark.full  # they compare with transformers and its processors

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=4)
SIZES = {"num_blocks": 80, "block_size": 4, "max_model_len": 200}
PROMPTS = {
    "one image": ("{0}What is this?", [(60, 40)]),
    "two images": ("Look: {0} and {0}: compare", [(33, 77), (48, 48)]),
    "text between": ("{0}a fox{0} by the sea {0}", [(10, 300), (500, 8), (47, 49)]),
}


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


def assert_equal_to_transformers(model: VisionModel, llm: LLM, text: str, images: list[Any]) -> None:
    """Tokens of the prompt, logprobs of the prompt and of the answer."""
    from dataclasses import replace

    prompt = {"prompt": text, "multi_modal_data": {"image": images}}
    (output,) = llm.generate([prompt], replace(GREEDY, prompt_logprobs=2))
    expected_ids = model.inputs(text, images)["input_ids"][0].tolist()
    assert output.prompt_token_ids == expected_ids
    answer = output.outputs[0]
    scores = log_softmax(model.logits(text, images, answer.token_ids))
    start = len(expected_ids)
    for number, position in enumerate(answer.logprobs):
        for token, logprob in position.items():
            assert abs(scores[start - 1 + number, token] - logprob.logprob) < 1e-3
    for place, position in enumerate(output.prompt_logprobs):
        for token, logprob in (position or {}).items():
            assert abs(scores[place - 1, token] - logprob.logprob) < 1e-3
    assert scores[start - 1 : -1].argmax(-1).tolist() == answer.token_ids


@pytest.mark.full
@pytest.mark.parametrize("chunk_size", [7, 512])
@pytest.mark.parametrize("kernels", ["native", "reference"])
def test_logits_equal_transformers(kernels: str, chunk_size: int) -> None:
    model = gemma3_model()
    with LLM(model.folder, kernels=kernels, chunk_size=chunk_size, **SIZES) as llm:
        for text, sizes in PROMPTS.values():
            images = [picture(*size, seed=number) for number, size in enumerate(sizes)]
            assert_equal_to_transformers(model, llm, text.format(model.place), images)


@pytest.mark.full
def test_an_image_longer_than_the_window_sees_all_of_itself() -> None:
    model = gemma3_model(window=9)
    with LLM(model.folder, **SIZES) as llm:
        assert_equal_to_transformers(model, llm, f"a long text before {model.place} and after", [picture(20, 30)])


@pytest.mark.full
def test_a_second_turn_computes_no_image_again() -> None:
    """The second prompt hits the prefix cache through the image, and its output is that of a cold engine."""
    model = gemma3_model()
    first = [{"role": "user", "content": [{"type": "image", "image": picture(50, 60)}, {"type": "text", "text": "Hi"}]}]
    with LLM(model.folder, **SIZES) as llm:
        (answer,) = llm.chat(first, GREEDY)
        reader = llm.engine.runner.images
        assert reader is not None
        assert reader.num_rows == 16
        second = [*first, {"role": "assistant", "content": "Yes"}, {"role": "user", "content": "And now?"}]
        (warm,) = llm.chat(second, GREEDY)
        assert reader.num_rows == 16
        assert warm.metrics.num_cached_tokens >= 20
    with LLM(model.folder, enable_prefix_caching=False, **SIZES) as cold:
        (again,) = cold.chat(second, GREEDY)
    assert again.outputs[0].token_ids == warm.outputs[0].token_ids
    assert again.outputs[0].logprobs == warm.outputs[0].logprobs
    assert (
        answer.prompt_token_ids
        == model.inputs(f"<user>{model.place}Hi;<assistant>", [picture(50, 60)])["input_ids"][0].tolist()
    )


@pytest.mark.full
def test_another_image_is_no_prefix_hit() -> None:
    """Two images have the same tokens: their blocks are told apart by their pixels."""
    model = gemma3_model()
    text = f"one two three {model.place} four"
    with LLM(model.folder, **SIZES) as llm:
        for seed in (0, 1, 0):
            assert_equal_to_transformers(model, llm, text, [picture(40, 40, seed)])
        prompts = [{"prompt": text, "multi_modal_data": {"image": picture(40, 40, seed)}} for seed in (0, 2, 0, 3)]
        together = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]
        alone = [llm.generate(prompt, GREEDY)[0].outputs[0].token_ids for prompt in prompts]
    assert together == alone


def test_wrong_images_are_refused() -> None:
    model = gemma3_model()
    with LLM(model.folder, **SIZES) as llm:
        for text, images, said in (
            ("no place", [picture(9, 9)], "has 0 places for images and 1 were passed"),
            (f"{model.place}{model.place}", [picture(9, 9)], "has 2 places for images and 1 were passed"),
            (f"{model.place}<image_soft_token>", [picture(9, 9)], "has 17 tokens of images and its images have 16"),
            (f"{model.place}", ["picture.png"], "an image is a PIL.Image or an array"),
        ):
            with pytest.raises(RequestError, match=said):
                llm.generate({"prompt": text, "multi_modal_data": {"image": images}}, GREEDY)
        with pytest.raises(RequestError, match="multi_modal_data has 'audio'"):
            llm.generate({"prompt": "a", "multi_modal_data": {"audio": b""}}, GREEDY)
        prompt = {"prompt": model.place, "multi_modal_data": {"image": picture(9, 9)}}
        for seen in (prompt, llm.prompt_tokens(prompt)):
            for call in (llm.embed, llm.encode):
                with pytest.raises(RequestError, match="vectors and scores are of texts alone"):
                    call(seen)
        with pytest.raises(RequestError, match="a text to embed has no suffix"):
            llm.embed({"prompt": "a", "suffix": "b"})
        with pytest.raises(RequestError, match="a prompt has no 'text'"):
            llm.embed({"text": "a"})
        tokens = llm.prompt_tokens("a fox")
        assert np.array_equal(llm.embed(tokens)[0].outputs.data, llm.embed("a fox")[0].outputs.data)
        assert not llm.engine.has_work
