"""K-quant files in the engine: what a request gets depends on the request alone, bit for bit, whatever runs beside it.

Each pair of features runs in company on the native kernels; tokens and logprobs must be those of the request alone.
"""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from bifolio import LLM, SamplingParams, SpeculativeConfig
from bifolio.kernels.native import NativeKernels
from bifolio.model.gguf.mixes import parse_mix
from bifolio.model.gguf.writer import write_gguf
from bifolio.model.loader import load_model
from bifolio.sequence import Request
from helpers import fresh_folder, random_prompt, tiny_folder

pytestmark = pytest.mark.full

FORMATS = {"q4_k_m": {"Q4_K", "Q6_K"}, "q6_k": {"Q6_K"}, "iq4_xs": {"IQ4_XS", "Q6_K"}}
CHOOSING: dict[str, dict[str, Any]] = {
    "n": {"n": 3},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4},
    "filters": {"top_p": 0.8, "top_k": 20},
}
NEUTRAL = ("ngram", "prefix hit", "chunked prefill", "preemption")
PROMPT = random_prompt(19, seed=4, vocab_size=200)


@cache
def model_file(format: str) -> Path:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "vocab_size": 200}
    source = tiny_folder(seed=3, **sizes)
    path = fresh_folder("kquant") / f"{format}.gguf"
    write_gguf(path, load_model(source), parse_mix(format))
    return path


def make_llm(format: str, features: frozenset[str]) -> LLM:
    return LLM(
        model_file(format), kernels=NativeKernels(1), poison_free_blocks=True, block_size=4,
        num_blocks=32 if "preemption" in features else 400, max_model_len=72, max_num_seqs=16,
        speculative=SpeculativeConfig("ngram", adaptive=False) if "ngram" in features else None,
        chunk_size=3 if "chunked prefill" in features else 64, token_budget=64, enable_prefix_caching=True,
    )  # fmt: skip


def add(llm: LLM, features: frozenset[str]) -> Request:
    options: dict[str, Any] = {"max_tokens": 16, "ignore_eos": True, "logprobs": 2, "allowed_token_ids": range(40, 52)}
    for feature in sorted(features & CHOOSING.keys()):
        options.update(CHOOSING[feature])
    return llm.engine.add_request("request", PROMPT, SamplingParams(temperature=0.8, seed=11, **options))


def drain(llm: LLM) -> None:
    for _ in range(3000):
        if not llm.engine.has_work:
            break
        llm.engine.step()
    assert not llm.engine.has_work


def essence(request: Request) -> list[Any]:
    return [
        (s.output_token_ids, [(entry.logprob, tuple(entry.top)) for entry in s.logprobs]) for s in request.sequences
    ]


@cache
def run_alone(format: str, features: frozenset[str]) -> list[Any]:
    llm = make_llm(format, features)
    request = add(llm, features)
    drain(llm)
    return essence(request)


@pytest.mark.full
def test_the_files_hold_these_formats() -> None:
    for format, expected in FORMATS.items():
        assert {kind.name for kind in load_model(model_file(format)).weights.formats()} == expected


@pytest.mark.full
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("first", "second"), itertools.combinations((*CHOOSING, *NEUTRAL), 2))
def test_pair(format: str, first: str, second: str) -> None:
    pair = frozenset({first, second})
    expected = run_alone(format, pair - set(NEUTRAL))
    llm = make_llm(format, pair)
    company = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    if "prefix hit" in pair:
        llm.engine.add_request("before", PROMPT, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
        drain(llm)
    for number in range(4):
        llm.engine.add_request(f"older {number}", [*PROMPT[number:], 5 + number], company)
    request = add(llm, pair)
    drain(llm)
    assert request.error is None
    assert essence(request) == expected
    if "prefix hit" in pair:
        assert request.metrics.num_cached_tokens > 0
    if "preemption" in pair:
        assert request.metrics.num_preemptions > 0
    if "ngram" in pair:
        assert sum(sequence.num_drafted for sequence in request.sequences) > 0
