"""Requests with adapters that change the head or the embedding: each has the output that it has alone."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from adapter_files import adapter_folder, end_folder
from bifolio import LLM, SamplingParams, SpeculativeConfig
from bifolio.engine import adapters as engine_adapters
from bifolio.errors import ConfigError, ModelFileError, RequestError
from bifolio.sequence import Request
from helpers import cpu_kernel_names, random_prompt, tiny_folder

KERNELS = "native" if "native" in cpu_kernel_names() else "reference"
SIZES: dict[str, Any] = {"block_size": 4, "num_blocks": 400, "max_model_len": 64, "max_num_seqs": 16, "chunk_size": 8}
PARAMS = SamplingParams(temperature=0.8, seed=3, max_tokens=7, logprobs=2, prompt_logprobs=1, ignore_eos=True)
KINDS: tuple[tuple[str, ...] | None, ...] = (
    None, ("own head",), ("own table",), ("head",), ("table",), (), ("own head", "own table"), ("head", "table"),
    ("own head", "table"),
)  # fmt: skip

needs_exact = pytest.mark.skipif(KERNELS != "native", reason="the reference kernels are not bit-identical")


@cache
def base(tied: bool) -> Path:
    return tiny_folder(tie_word_embeddings=tied)


@cache
def adapter(number: int, tied: bool) -> Path:
    kinds = KINDS[number % len(KINDS)]
    return end_folder(base(tied), *(kinds or ()), seed=number)


def make_llm(tied: bool = False, **options: Any) -> LLM:
    return LLM(base(tied), **{**SIZES, "kernels": KERNELS, "poison_free_blocks": True, **options})


def essence(request: Request) -> list[Any]:
    prompt = list(request.prompt_logprobs or ())
    return [(s.output_token_ids, list(s.logprobs), prompt) for s in request.sequences]


def finish(llm: LLM, *requests: Request) -> list[list[Any]]:
    while llm.engine.has_work:
        llm.engine.step()
    assert [request.error for request in requests] == [None] * len(requests)
    return [essence(request) for request in requests]


def alone(number: int, prompt: tuple[int, ...], tied: bool, **options: Any) -> list[Any]:
    llm = make_llm(tied, max_num_seqs=1, enable_prefix_caching=False, **options)
    own = None if KINDS[number % len(KINDS)] is None else llm.engine.adapters.load("a", adapter(number, tied))
    return finish(llm, llm.engine.add_request("alone", prompt, PARAMS, adapter=own))[0]


@needs_exact
@pytest.mark.parametrize("tied", [False, True])
def test_mixed_adapters_in_one_batch_have_their_solo_outputs(tied: bool) -> None:
    llm = make_llm(tied, token_budget=64)
    prompts = [tuple(random_prompt(3 + number, number, 61)) for number in range(len(KINDS))]
    found = [
        None if kinds is None else llm.engine.adapters.load(f"a{number}", adapter(number, tied))
        for number, kinds in enumerate(KINDS)
    ]
    requests = [
        llm.engine.add_request(str(number), prompts[number], PARAMS, adapter=found[number])
        for number in range(len(KINDS))
    ]
    results = finish(llm, *requests)
    for number, result in enumerate(results):
        assert result == alone(number, prompts[number], tied), KINDS[number]
    same = [alone(number, prompts[1], tied) for number in range(len(KINDS))]
    assert all(first != second for place, first in enumerate(same) for second in same[:place])


@needs_exact
@pytest.mark.full
@pytest.mark.parametrize("number", [1, 2, 7])
def test_other_features_keep_the_ends_of_an_adapter(number: int) -> None:
    """Drafts of n-grams, which the adapted head verifies, and small chunks of the prompt change no token."""
    prompt = tuple(random_prompt(9, 2, 61)) * 2
    plain = alone(number, prompt, tied=False)
    drafted = alone(number, prompt, tied=False, speculative=SpeculativeConfig("ngram", adaptive=False))
    assert [tokens for tokens, *_ in drafted] == [tokens for tokens, *_ in plain]
    assert alone(number, prompt, tied=False, chunk_size=3) == plain


def test_cached_blocks_belong_to_one_embedding() -> None:
    llm = make_llm()
    prompt = random_prompt(20, vocab_size=61)

    def cached(name: str | None) -> int:
        own = None if name is None else llm.engine.adapters.get(name)
        request = llm.engine.add_request("r", prompt, PARAMS, adapter=own)
        finish(llm, request)
        return request.metrics.num_cached_tokens

    params = {"base": base(False)}
    llm.engine.adapters.load("head", end_folder(params["base"], "own head"))
    llm.engine.adapters.load("table", end_folder(params["base"], "own table"))
    llm.engine.adapters.load("plain", adapter_folder(params["base"]))
    first = [cached(name) for name in (None, "head", "table", "plain")]
    assert first == [0, 0, 0, 0]
    llm.engine.adapters.load("head", end_folder(params["base"], "own head", seed=1), in_place=True)
    assert cached("head") == 0


@needs_exact
def test_replaced_weights_and_sleep_keep_the_ends() -> None:
    llm = make_llm()
    prompt = tuple(random_prompt(9, 1, 61))
    own = llm.engine.adapters.load("a", adapter(6, False))

    def run() -> list[Any]:
        return finish(llm, llm.engine.add_request("r", prompt, PARAMS, adapter=own))[0]

    before = run()
    llm.sleep(2)
    assert llm.engine.adapters.load("b", adapter(6, False)).digest == own.digest
    llm.wake_up()
    assert run() == before
    damaged = end_folder(base(False), "own head", modules_to_save=["lm_head", "embed_tokens"])
    with pytest.raises(ModelFileError, match=r"embed_tokens\.weight is missing"):
        llm.engine.adapters.load("a", damaged, in_place=True)
    assert llm.engine.adapters.get("a") is own
    llm.load_weights(base(False))
    assert run() == before
    llm.engine.adapters.unload("a")
    assert finish(llm, llm.engine.add_request("b", prompt, PARAMS))[0] == alone(0, prompt, False)


def test_matrices_of_an_adapter_are_counted_and_not_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm()
    plain = llm.engine.adapters.load("plain", adapter_folder(base(False)))
    own = llm.engine.adapters.load("own", adapter(6, False))
    config = llm.model.config
    assert own.weights.nbytes - plain.weights.nbytes == 2 * 4 * config.vocab_size * config.hidden_size
    for parts in ([("own", 0.5)], [("own", 1.0), ("plain", 1.0)]):
        with pytest.raises((RequestError, ModelFileError), match="cannot be scaled or added"):
            llm.engine.adapters.sum(parts)
    monkeypatch.setattr(engine_adapters, "free_memory", lambda: 1000)
    with pytest.raises(ConfigError, match=r"of its own head and embedding, and .* of memory are free"):
        llm.engine.adapters.load("other", adapter(1, False))
    assert "other" not in llm.engine.adapters
