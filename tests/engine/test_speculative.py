"""Speculation changes speed and nothing else: tokens, logprobs and ends are the plain run's."""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bifolio import LLM, SamplingParams, SpeculativeConfig
from bifolio.api.outputs import RequestOutput
from bifolio.engine.speculative.ngram import _NgramIndex
from bifolio.engine.speculative.speculator import num_accepted
from bifolio.errors import ConfigError
from bifolio.kernels.reference import ReferenceKernels
from helpers import random_prompt, tiny_folder

VOCAB = 61


@cache
def folder(seed: int = 0, vocab_size: int = VOCAB) -> Path:
    return tiny_folder(seed=seed, vocab_size=vocab_size)


def make_llm(speculative: SpeculativeConfig | None = None, **options: Any) -> LLM:
    settings = {"num_blocks": 300, "block_size": 4, "max_model_len": 96, "max_num_seqs": 8, "chunk_size": 7,
                "token_budget": 40, **options}  # fmt: skip
    return LLM(folder(), kernels=ReferenceKernels(), poison_free_blocks=True, speculative=speculative, **settings)


SETTINGS = {
    "ngram": SpeculativeConfig("ngram", adaptive=False),
    "ngram, adaptive": SpeculativeConfig("ngram"),
    "same draft": SpeculativeConfig("draft", draft_model=str(folder()), adaptive=False, length=3),
    "other draft": SpeculativeConfig("draft", draft_model=str(folder(seed=9)), adaptive=False, length=5),
    "draft, adaptive": SpeculativeConfig("draft", draft_model=str(folder())),
}


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts that repeat themselves, greedy and sampled, with options that look at the text so far."""
    prompts = [random_prompt(1 + i % 6, i, VOCAB) * 4 for i in range(12)]
    params = [
        SamplingParams(
            temperature=(0.0, 0.7, 1.2)[i % 3], seed=i, max_tokens=20, n=1 + i % 2, logprobs=2, ignore_eos=i % 4 != 0,
            repetition_penalty=1.15 if i % 5 == 0 else 1.0, top_p=0.9 if i % 2 else 1.0,
            stop_token_ids=(7, 9) if i % 3 == 1 else (), no_repeat_ngram_size=3 if i % 7 == 3 else 0,
        )
        for i in range(12)
    ]  # fmt: skip
    return prompts, params


def essence(outputs: list[RequestOutput]) -> list[Any]:
    return [[(o.token_ids, o.finish_reason, o.stop_reason) for o in output.outputs] for output in outputs]


@cache
def plain() -> list[RequestOutput]:
    return make_llm().generate(*requests())


@pytest.mark.full
@pytest.mark.parametrize("num_blocks", [300, 30])
@pytest.mark.parametrize("name", SETTINGS)
def test_the_output_is_the_plain_run_s(name: str, num_blocks: int) -> None:
    llm = make_llm(SETTINGS[name], num_blocks=num_blocks)
    outputs = llm.generate(*requests())
    assert essence(outputs) == essence(plain())
    for mine, theirs in zip(outputs, plain(), strict=True):
        for a, b in zip(mine.outputs, theirs.outputs, strict=True):
            assert [t.logprob for t in a.logprobs or []] == pytest.approx(
                [t.logprob for t in b.logprobs or []], abs=1e-5
            )
    speculator = llm.engine.speculator
    assert speculator is not None
    assert speculator.stats.num_draft_tokens > 0 or "adaptive" in name  # which drafts only if measured times favour it
    assert llm.engine.blocks.num_used_blocks == 0
    llm.engine.blocks.check_invariants()


@pytest.mark.full
def test_a_perfect_draft_is_always_accepted_and_saves_steps() -> None:
    llm = make_llm(SETTINGS["same draft"])
    llm.generate(*requests())
    assert llm.engine.speculator is not None
    assert llm.engine.speculator.stats.acceptance_rate == 1.0
    without = make_llm()
    without.generate(*requests())
    assert llm.engine.stats().num_steps < 0.6 * without.engine.stats().num_steps


def test_statistics_of_a_request() -> None:
    llm = make_llm(SETTINGS["same draft"])
    request = llm.engine.add_request("r", [5, 6, 7], SamplingParams(temperature=0, max_tokens=13, ignore_eos=True))
    while llm.engine.has_work:
        llm.engine.step()
    sequence = request.sequences[0]
    assert sequence.num_accepted == sequence.num_drafted > 0
    assert llm.engine.speculator is not None
    assert llm.engine.speculator.stats.num_accepted_tokens == sequence.num_accepted


@pytest.mark.full
@pytest.mark.parametrize(("temperature", "length"), [(0.5, 1), (1.0, 4)])
def test_sampled_speculation_has_the_target_s_distribution(temperature: float, length: int) -> None:
    check_distribution(temperature, length, draws=1000)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.5, 1.0])
@pytest.mark.parametrize("length", range(1, 9))
def test_distribution_over_many_draws(temperature: float, length: int) -> None:
    check_distribution(temperature, length, draws=20_000)


def check_distribution(temperature: float, length: int, draws: int) -> None:
    """The first three tokens of many draws against their exact distribution, by chi-square; the draft is another model.

    There is room for a whole draft: the first pass verifies `length` guesses at once.
    """
    from scipy import stats  # two seconds, so not at the top

    target, draft = folder(vocab_size=8), folder(seed=3, vocab_size=8)
    config = SpeculativeConfig("draft", draft_model=str(draft), adaptive=False, length=length)
    llm = LLM(target, device="cpu", speculative=config, num_blocks=4000, block_size=4, max_model_len=24,
              max_num_seqs=512, token_budget=8192, enable_prefix_caching=True)  # fmt: skip
    prompt = [3, 4, 5]
    params = [
        SamplingParams(temperature=temperature, seed=1000 * length + i, max_tokens=length + 2, ignore_eos=True)
        for i in range(draws)
    ]
    outputs = llm.generate([prompt] * draws, params, use_tqdm=False)
    counts = Counter(tuple(output.outputs[0].token_ids[:3]) for output in outputs)
    assert llm.engine.speculator is not None
    assert llm.engine.speculator.stats.num_draft_tokens > 0.9 * length * draws
    exact = exact_distribution(llm, prompt, 3, temperature)
    likely = {tokens: p for tokens, p in exact.items() if p * draws >= 5}
    observed = [counts[tokens] for tokens in likely]
    expected = [p * draws for p in likely.values()]
    observed.append(draws - sum(observed))
    expected.append(draws - sum(expected))
    assert stats.chisquare(observed, expected).pvalue > 1e-4


def exact_distribution(llm: LLM, prompt: list[int], length: int, temperature: float) -> dict[tuple[int, ...], float]:
    """Probability of every continuation, from the prompt logprobs of a plain engine."""
    frontier: dict[tuple[int, ...], float] = {(): 1.0}
    scorer = LLM(llm.model, device="cpu", num_blocks=2000, block_size=4, max_model_len=24,
                 max_num_seqs=128, token_budget=2048)  # fmt: skip
    greedy = SamplingParams(temperature=0, max_tokens=1, logprobs=8)
    for _ in range(length):
        prompts = [[*prompt, *tokens] for tokens in frontier]
        grown: dict[tuple[int, ...], float] = {}
        for output, (tokens, mass) in zip(
            scorer.generate(prompts, greedy, use_tqdm=False), frontier.items(), strict=True
        ):
            entry = (output.outputs[0].logprobs or [])[0]
            weights = np.exp(np.array([value for _, value in entry.top], dtype=np.float64) / temperature)
            for (token, _), p in zip(entry.top, weights / weights.sum(), strict=True):
                grown[(*tokens, token)] = mass * float(p)
        frontier = grown
    return frontier


def test_ngram_index_finds_the_latest_longest_match() -> None:
    index = _NgramIndex(range(3, 0, -1))
    tokens = [1, 2, 3, 9, 1, 2, 3, 8, 5, 1, 2, 3]
    assert index.guess(tokens, 3) == ((8, 5, 1), 3)
    assert index.guess([*tokens, 7], 3) == ((), 0)  # 7 was never seen before
    assert index.guess([*tokens, 7, 9], 2) == ((1, 2), 1)  # one token matches
    assert _NgramIndex(range(2, 1, -1)).guess([4], 3) == ((), 0)


def test_num_accepted() -> None:
    assert num_accepted((1, 2, 3), [1, 2, 3, 4]) == 3
    assert num_accepted((1, 2, 3), [1, 5, 3, 4]) == 1
    assert num_accepted((), [1]) == 0


def test_a_draft_model_with_another_vocabulary_is_refused() -> None:
    with pytest.raises(ConfigError, match="same tokenizer"):
        make_llm(SpeculativeConfig("draft", draft_model=str(folder(vocab_size=50))))
    with pytest.raises(ConfigError, match="ngram"):
        SpeculativeConfig(method="magic")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["ngram", "same draft", "other draft"])
@pytest.mark.parametrize("has_company", [False, True])
def test_a_draft_that_no_token_can_follow_ends_its_request_alone(name: str, has_company: bool) -> None:
    """With two allowed tokens every n-gram of three soon occurs: the row of a draft has no token left."""
    stuck = SamplingParams(temperature=0.0, max_tokens=30, allowed_token_ids=(4, 5), no_repeat_ngram_size=3)
    company = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    cases = [([4, 5, 4, 5], stuck), *[([6 + i, 7, 8] * 3, company) for i in range(3) if has_company]]

    def run(speculative: SpeculativeConfig | None) -> tuple[LLM, list[Any]]:
        llm = make_llm(speculative, max_num_seqs=4)
        requests = [llm.engine.add_request(str(i), prompt, params) for i, (prompt, params) in enumerate(cases)]
        while llm.engine.has_work:
            llm.engine.step()
        return llm, [(r.error, [(s.output_token_ids, s.finish_reason) for s in r.sequences]) for r in requests]

    llm, found = run(SETTINGS[name])
    assert found == run(None)[1]
    assert "no token can follow" in found[0][0]
    assert all(error is None for error, _ in found[1:])
    assert not llm.engine.requests
    assert llm.engine.blocks.num_used_blocks == 0
    assert llm.engine.speculator is not None
    assert llm.engine.speculator.stats.num_draft_tokens > 0
    assert not llm.engine.phases._speculation._drafts  # type: ignore[union-attr]
