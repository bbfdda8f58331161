"""Requests to a small model with LongRoPE: batches of short and long sequences, and their scores by themselves."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from bifolio.engine.engine import InferenceEngine
from bifolio.model.huggingface.hf_loader import load_folder
from bifolio.model.loaded import LoadedModel
from bifolio.sampling_params import SamplingParams
from bifolio.sequence import Request
from helpers import drain, random_prompt, tiny_folder

CONTEXT = 32  # tokens that the short factors rotate
ROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": CONTEXT}
# (prompt tokens, max_tokens): short, long by the prompt, long by the output, on either side of the border
REQUESTS = {"short": (20, 8), "long": (40, 6), "long output": (20, 20), "just short": (24, 8), "just long": (24, 9)}


def factors(half: int) -> dict[str, list[float]]:
    return {"short_factor": [1 + i / 8 for i in range(half)], "long_factor": [2.0 + i for i in range(half)]}


@cache
def long_rope_model() -> LoadedModel:
    scaling: Any = {**ROPE, **factors(4)}
    folder = tiny_folder(rope_scaling=scaling, original_max_position_embeddings=CONTEXT, max_position_embeddings=256)
    return load_folder(folder)


def add_all(engine: InferenceEngine, prefix: str = "", names: tuple[str, ...] = tuple(REQUESTS)) -> dict[str, Request]:
    """Queue these requests: greedy, with logprobs of prompt and output."""
    vocab, found = engine.model.config.vocab_size, {}
    for name in names:
        length, count = REQUESTS[name]
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, logprobs=0, prompt_logprobs=0)
        found[name] = engine.add_request(prefix + name, random_prompt(length, length, vocab), params)
    return found


def run_all(engine: InferenceEngine, names: tuple[str, ...] = tuple(REQUESTS)) -> dict[str, Request]:
    requests = add_all(engine, names=names)
    drain(engine)
    return requests


def tokens_of(request: Request) -> list[int]:
    return list(request.sequences[0].token_ids)


def scores_of(request: Request) -> np.ndarray:
    """f64[tokens - 1]: the logprob of every token after the first, in the prompt and in the output."""
    prompt = [one.logprob for one in (request.prompt_logprobs or [])[1:] if one is not None]
    return np.array([*prompt, *(one.logprob for one in request.sequences[0].logprobs)])
