"""Requests with images to small models, held against transformers and against engines on the reference kernels."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import Any

import numpy as np
from later_models import gemma4_large_model, gemma4_model, gemma4_unified_model, mistral3_model
from vision_models import (
    VisionModel,
    gemma3_model,
    idefics3_model,
    picture,
    qwen3_5_model,
    qwen3_vl_model,
    qwen3_vl_moe_model,
)

from bifolio.api.images import with_images
from bifolio.beam_params import BeamSearchParams
from bifolio.engine.engine import InferenceEngine
from bifolio.model.loaded import LoadedModel
from bifolio.model.loader import load_model
from bifolio.prompts import PromptTokens
from bifolio.sampling_params import SamplingParams
from bifolio.sequence import Request

MODELS = {
    "gemma3": gemma3_model,
    "qwen3_vl": qwen3_vl_model,
    "qwen3_vl_moe": qwen3_vl_moe_model,
    "qwen3_5": qwen3_5_model,
    "smolvlm": idefics3_model,
    "gemma4": gemma4_model,
    "gemma4_large": gemma4_large_model,
    "gemma4_unified": gemma4_unified_model,
    "mistral3": mistral3_model,
}
SIZES = {"num_blocks": 320, "max_model_len": 512, "max_num_seqs": 6, "token_budget": 64, "chunk_size": 48}
PROMPTS = {  # in the order of their arrival: (text, numbers of pictures)
    "image": ("{0}What is this?", (0,)),
    "text": ("a text without any image beside the others", ()),
    "two images": ("Look: {0} and {0}: compare them", (1, 2)),
    "the first again": ("{0}What is this? And where?", (0,)),
}
KINDS: dict[str, Any] = {
    "greedy": SamplingParams(temperature=0, max_tokens=7, ignore_eos=True, logprobs=2),
    "drawn": SamplingParams(temperature=1.0, seed=3, max_tokens=7, ignore_eos=True, logprobs=2),
    "several": SamplingParams(temperature=1.0, seed=4, n=2, max_tokens=7, ignore_eos=True, logprobs=2),
    "beams": BeamSearchParams(beam_width=2, max_tokens=7, ignore_eos=True),
}
GREEDY = SamplingParams(temperature=0, max_tokens=7, ignore_eos=True, logprobs=3, prompt_logprobs=1)


@cache
def loaded(name: str) -> LoadedModel:
    return load_model(MODELS[name]().folder)


def pictures(numbers: tuple[int, ...]) -> list[Any]:
    return [picture(40 + 13 * number, 52 - 9 * number, number) for number in numbers]


def prompt_of(name: str, text: str, numbers: tuple[int, ...]) -> PromptTokens:
    model = loaded(name)
    text = text.format(MODELS[name]().place)
    if numbers:
        assert model.vision is not None
        return with_images(model, text, None, [model.vision.read(image) for image in pictures(numbers)])
    return PromptTokens(text, model.require_tokenizer().encode(text))


def run_prompts(engine: InferenceEngine, name: str, params: Any = GREEDY) -> dict[str, Request]:
    """All prompts, one more after each second step: images are read beside decodes."""
    found = {}
    for key, (text, numbers) in PROMPTS.items():
        prompt = prompt_of(name, text, numbers)
        found[key] = engine.add_request(key, prompt.token_ids, params, images=prompt.images)
        engine.step()
        engine.step()
    drain(engine)
    return found


def drain(engine: InferenceEngine) -> None:
    while engine.has_work:
        engine.step()
    assert engine.blocks.num_used_blocks == 0


def second_turn(engine: InferenceEngine, name: str, first: Request) -> Request:
    """The text continues behind the answer: the image is a prefix hit, and no row of it is computed."""
    reader = engine.runner.images
    assert reader is not None
    computed = reader.num_rows
    more = loaded(name).require_tokenizer().encode(" and then what?", add_special_tokens=False)
    tokens = [*first.sequences[0].token_ids, *more]
    params = SamplingParams(temperature=0, max_tokens=7, ignore_eos=True, logprobs=3)
    request = engine.add_request("second turn", tokens, params, images=first.images)
    drain(engine)
    assert reader.num_rows == computed
    assert request.metrics.num_cached_tokens >= first.images[-1].end // 4 * 4
    return request


def outputs_of(request: Request) -> list[list[int]]:
    return [sequence.output_token_ids for sequence in request.sequences]


def scores_of(request: Request) -> np.ndarray:
    """f64: the logprobs of a request's tokens: of the prompt if they were asked for, and of the output."""
    prompt = [one.logprob for one in (request.prompt_logprobs or [])[1:] if one is not None]
    return np.array([*prompt, *(one.logprob for one in request.sequences[0].logprobs)])


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


def expected_logits(name: str, text: str, numbers: tuple[int, ...], after: list[int], dtype: str) -> np.ndarray:
    """f32[t, vocab] by transformers, on the CPU."""
    model = MODELS[name]()
    if dtype != "f32":
        model = rounded(name, dtype)
    return model.logits(text.format(model.place), pictures(numbers), after)


@cache
def rounded(name: str, dtype: str) -> VisionModel:
    """The model with weights and activations in 16 bits."""
    import torch

    model = MODELS[name]()
    kind = {"bf16": torch.bfloat16, "f16": torch.float16}[dtype]
    return VisionModel(deepcopy(model.model).to(kind), model.processor, model.folder, model.place)


def worst_error(name: str, key: str, request: Request, dtype: str = "f32") -> tuple[float, float]:
    """The largest error of a logprob, ours and that of transformers in `dtype`, from transformers in f32."""
    (text, numbers), answer = PROMPTS[key], request.sequences[0].output_token_ids
    exact = log_softmax(expected_logits(name, text, numbers, answer, "f32"))
    tokens = request.sequences[0].token_ids
    ours = scores_of(request)
    first = len(tokens) - len(ours)
    places = np.arange(first, len(tokens))
    own = float(np.abs(ours - exact[places - 1, np.asarray(tokens)[places]]).max())
    if dtype == "f32":
        return own, 0.0
    theirs = log_softmax(expected_logits(name, text, numbers, answer, dtype))
    return own, float(np.abs((theirs - exact)[places - 1, np.asarray(tokens)[places]]).max())


def assert_greedy(name: str, key: str, request: Request) -> None:
    """Each token of the answer is the likeliest one."""
    (text, numbers), answer = PROMPTS[key], request.sequences[0].output_token_ids
    exact = expected_logits(name, text, numbers, answer, "f32")
    assert exact[-len(answer) - 1 : -1].argmax(-1).tolist() == answer
