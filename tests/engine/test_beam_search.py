"""Beam search inside the running batch, against transformers' `generate(num_beams=...)`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bifolio import LLM, BeamSearchParams, SamplingParams
from bifolio.engine.beam.hypotheses import best_candidates, top_of_rows
from bifolio.errors import RequestError
from bifolio.kernels.interface import KernelSet
from bifolio.kernels.reference import ReferenceKernels
from helpers import random_prompt, tiny_folder, tiny_model

WIDTHS, PENALTIES, STOPPING = (1, 2, 4, 8), (0.0, 1.0, 2.0), (True, False, "never")


@cache
def tiny_llm(folder: Any, new_kernels: Callable[[], KernelSet] = ReferenceKernels, **options: Any) -> LLM:
    settings = {"num_blocks": 400, "block_size": 4, "max_model_len": 120, "max_num_seqs": 16, **options}
    return LLM(folder, kernels=new_kernels(), poison_free_blocks=True, **settings)


def transformers_beams(
    model: Any, prompt: list[int], eos: list[int] | None, **options: Any
) -> list[tuple[list[int], float]]:
    """(tokens, score) of the returned sequences, best first; the padding behind an end is cut."""
    import torch

    ids = torch.tensor([prompt])
    model.generation_config.eos_token_id = eos
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, return_dict_in_generate=True,
        output_scores=True, **options,
    )  # fmt: skip
    found = []
    for tokens, score in zip(out.sequences[:, len(prompt) :].tolist(), out.sequences_scores.tolist(), strict=True):
        ends = [i for i, token in enumerate(tokens) if token in (eos or [])]
        found.append((tokens[: ends[0] + 1] if ends else tokens, score))
    return found


@pytest.mark.full
@pytest.mark.sampled(3)
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma3"])
@pytest.mark.parametrize("eos", [None, [7], [5, 60]])
def test_beams_equal_transformers(
    architecture: str, eos: list[int] | None, new_kernels: Callable[[], KernelSet]
) -> None:
    model, folder = tiny_model(architecture)
    llm = tiny_llm(folder, new_kernels)
    for number, (width, penalty, stopping) in enumerate(itertools.product(WIDTHS[1:], PENALTIES, STOPPING)):
        if (number + len(architecture) + len(eos or ())) % 3:  # a third of them for each architecture and end
            continue
        prompt = random_prompt(5 + number % 9, seed=number)
        returned = width if number % 2 else 1
        params = BeamSearchParams(
            width, max_tokens=10, length_penalty=penalty, early_stopping=stopping, num_return_sequences=returned,
            ignore_eos=True, stop_token_ids=tuple(eos or ()),
        )  # fmt: skip
        expected = transformers_beams(
            model, prompt, eos, num_beams=width, num_return_sequences=returned, max_new_tokens=10,
            length_penalty=penalty, early_stopping=stopping,
        )  # fmt: skip
        outputs = llm.beam_search([prompt], params)[0].outputs
        assert [output.token_ids for output in outputs] == [tokens for tokens, _ in expected], params
        assert [output.score for output in outputs] == pytest.approx([score for _, score in expected], abs=1e-4)
    assert llm.engine.blocks.num_used_blocks == 0


def test_width_one_is_greedy() -> None:
    llm = tiny_llm(tiny_folder_once())
    prompts = [random_prompt(n, n, 61) for n in (1, 4, 9)]
    beams = llm.beam_search(prompts, BeamSearchParams(1, max_tokens=12))
    greedy = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12))
    assert [b.outputs[0].token_ids for b in beams] == [g.outputs[0].token_ids for g in greedy]


@cache
def tiny_folder_once(**options: Any) -> Any:
    return tiny_folder(**options)


@pytest.mark.full
def test_beams_beside_others_under_preemption_give_the_same() -> None:
    """A pool so small that searches are preempted and come back, with ordinary requests around them."""
    folder = tiny_folder_once()
    roomy = tiny_llm(folder)
    prompts = [random_prompt(11 + n, n, 61) for n in range(6)]
    params = BeamSearchParams(3, max_tokens=14, ignore_eos=True)
    plain = SamplingParams(temperature=0.9, seed=4, max_tokens=14, ignore_eos=True, n=2)
    expected = [[(o.token_ids, o.score) for o in out.outputs] for out in roomy.beam_search(prompts, params)]
    expected_plain = [[o.token_ids for o in out.outputs] for out in roomy.generate(prompts, plain)]
    tight = LLM(folder, kernels=ReferenceKernels(), num_blocks=23, block_size=4, max_model_len=40, max_num_seqs=9,
                chunk_size=5, token_budget=17, poison_free_blocks=True)  # fmt: skip
    searches = [tight.engine.add_beam_search(f"b{i}", p, params) for i, p in enumerate(prompts)]
    others = [tight.engine.add_request(f"g{i}", p, plain) for i, p in enumerate(prompts)]
    while tight.engine.has_work:
        tight.engine.step()
        tight.engine.blocks.check_invariants()
    assert tight.engine.stats().num_preemptions > 0
    got = [[(s.output_token_ids, s.score) for s in request.sequences] for request in searches]
    assert [[tokens for tokens, _ in beams] for beams in got] == [[tokens for tokens, _ in beams] for beams in expected]
    for mine, theirs in zip(itertools.chain(*got), itertools.chain(*expected), strict=True):
        assert mine[1] == pytest.approx(theirs[1], abs=1e-5)
    assert [[s.output_token_ids for s in request.sequences] for request in others] == expected_plain
    assert any(request.metrics.num_preemptions for request in searches)
    assert tight.engine.blocks.num_used_blocks == 0


def test_beams_share_the_prompt_and_what_they_agree_on() -> None:
    llm = tiny_llm(tiny_folder_once())
    engine = llm.engine
    engine.add_beam_search("search", random_prompt(41, 1, 61), BeamSearchParams(8, max_tokens=6, ignore_eos=True))
    most = 0
    while engine.has_work:
        engine.step()
        most = max(most, engine.blocks.num_used_blocks)
    assert most <= 10 + 8 * 3  # the prompt's ten full blocks once, at most three of its own for each beam
    assert most < 8 * 12 / 2


def test_stop_strings_logprobs_and_text() -> None:
    llm = tiny_llm(tiny_folder_once(tokenizer=True))
    free = llm.beam_search("Once upon", BeamSearchParams(4, max_tokens=12, ignore_eos=True, logprobs=2))[0].outputs
    text = free[0].text
    assert text
    assert len(free[0].logprobs or []) == len(free[0].token_ids)
    assert free[0].cumulative_logprob == pytest.approx(sum(t.logprob for t in free[0].logprobs or []), abs=1e-4)
    stop = text[2:4]
    favour_short = BeamSearchParams(4, max_tokens=12, ignore_eos=True, stop=(stop,), length_penalty=-3.0)
    cut = llm.beam_search("Once upon", favour_short)[0].outputs
    assert all(stop not in output.text for output in cut)
    assert any(output.finish_reason == "stop" and output.stop_reason == stop for output in cut)


def test_processors_bias_and_min_tokens_reach_the_beams() -> None:
    llm = tiny_llm(tiny_folder_once())
    prompt = random_prompt(6, 3, 61)

    def only_even(tokens: list[int], logits: Any) -> Any:
        logits[1::2] = -np.inf
        return logits

    for params, holds in (
        (BeamSearchParams(4, max_tokens=8, logits_processors=(only_even,)), lambda ids: all(i % 2 == 0 for i in ids)),
        (BeamSearchParams(4, max_tokens=8, logit_bias={9: -100.0, 11: -100.0}), lambda ids: not {9, 11} & set(ids)),
        (
            BeamSearchParams(4, max_tokens=8, allowed_token_ids=(4, 5, 6, 7, 8)),
            lambda ids: set(ids) <= set(range(4, 9)),
        ),
        (BeamSearchParams(4, max_tokens=8, no_repeat_ngram_size=1), lambda ids: len(set(ids)) == len(ids)),
        (
            BeamSearchParams(4, max_tokens=8, min_tokens=5, stop_token_ids=tuple(range(3, 30))),
            lambda ids: len(ids) >= 6,
        ),
    ):
        outputs = llm.beam_search([prompt], params)[0].outputs
        assert outputs, params
        assert all(holds(output.token_ids) for output in outputs), params


def test_a_failing_processor_ends_this_search_alone() -> None:
    llm = tiny_llm(tiny_folder_once())

    def broken(tokens: list[int], logits: Any) -> Any:
        raise ValueError("no")

    engine = llm.engine
    bad = engine.add_beam_search("bad", [5, 6, 7], BeamSearchParams(3, max_tokens=4, logits_processors=(broken,)))
    good = engine.add_beam_search("good", [5, 6, 7], BeamSearchParams(3, max_tokens=4))
    while engine.has_work:
        engine.step()
    assert bad.error is not None
    assert "no" in bad.error
    assert good.error is None
    assert len(good.sequences[0].output_token_ids) >= 1
    assert engine.blocks.num_used_blocks == 0


def test_groups_differ() -> None:
    llm = tiny_llm(tiny_folder_once())
    prompt = random_prompt(8, 5, 61)
    alike = llm.beam_search([prompt], BeamSearchParams(4, max_tokens=6, ignore_eos=True))[0].outputs
    params = BeamSearchParams(4, max_tokens=6, ignore_eos=True, num_groups=4, diversity_penalty=5.0)
    diverse = llm.beam_search([prompt], params)[0].outputs
    first_tokens = [output.token_ids[0] for output in diverse]
    assert len(set(first_tokens)) == 4
    assert len({output.token_ids[0] for output in alike}) < 4


def test_wide_beams() -> None:
    llm = tiny_llm(tiny_folder_once(), max_num_seqs=64, num_blocks=700)
    outputs = llm.beam_search([random_prompt(9, 2, 61)], BeamSearchParams(64, max_tokens=8, ignore_eos=True))[0].outputs
    assert len({tuple(output.token_ids) for output in outputs}) == 64
    scores = [output.score for output in outputs]
    assert scores == sorted(scores, reverse=True)


def test_abort_gives_everything_back() -> None:
    engine = tiny_llm(tiny_folder_once()).engine
    for steps in range(5):
        engine.add_beam_search("search", random_prompt(9, steps, 61), BeamSearchParams(4, max_tokens=30))
        for _ in range(steps):
            engine.step()
        engine.abort("search")
        while engine.has_work:
            engine.step()
        assert engine.blocks.num_used_blocks == 0


def test_what_cannot_fit_is_refused_with_numbers() -> None:
    llm = tiny_llm(tiny_folder_once(), num_blocks=40, max_model_len=100)
    with pytest.raises(RequestError, match=r"may need \d+ blocks and the cache has 39"):
        llm.beam_search([[5] * 40], BeamSearchParams(16, max_tokens=50))
    with pytest.raises(RequestError, match="max_num_seqs >= 17"):
        llm.beam_search([[5]], BeamSearchParams(17, max_tokens=2))
    for bad in ({"beam_width": 0}, {"num_return_sequences": 9}, {"length_penalty": float("nan")},
                {"early_stopping": "soon"}, {"num_groups": 3}):  # fmt: skip
        with pytest.raises(RequestError):
            BeamSearchParams(**{"beam_width": 4, **bad})


@given(st.integers(1, 5), st.integers(1, 700), st.integers(1, 12), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_best_candidates_equal_a_full_sort(rows: int, width: int, count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((rows, width)).astype(np.float32)
    count = min(count, width)
    _, found = top_of_rows(values, count)
    assert np.array_equal(np.sort(found, axis=1), np.sort(values, axis=1)[:, width - count :])
    running = rng.standard_normal(rows).astype(np.float32)
    totals = (values + running[:, None]).ravel()
    best = best_candidates(values, running.tolist(), min(count, totals.size))
    assert [c.score for c in best] == sorted(totals.tolist(), reverse=True)[: len(best)]
    assert all(totals.reshape(rows, width)[c.beam, c.token] == np.float32(c.score) for c in best)


@pytest.mark.parametrize("options", [{}, {"num_groups": 2, "diversity_penalty": 0.5}, {"logprobs": 1}])
def test_a_search_without_a_possible_text_ends_with_an_error(options: dict[str, Any]) -> None:
    """One token is allowed and no pair of tokens may repeat: the third token is impossible, and no beam has ended."""
    llm = tiny_llm(tiny_folder_once())
    params = BeamSearchParams(2, max_tokens=9, allowed_token_ids=(3,), no_repeat_ngram_size=2, **options)
    for _ in range(2):
        output = llm.beam_search([[5, 6, 7]], params)[0]
        assert output.error is not None
        assert "no token can follow" in output.error
        assert [completion.finish_reason for completion in output.outputs] == ["error"]
        assert not llm.engine.requests
        assert llm.engine.blocks.num_used_blocks == 0


def test_ended_texts_are_returned_when_no_other_is_possible() -> None:
    llm = tiny_llm(tiny_folder_once())
    params = BeamSearchParams(
        3, max_tokens=9, allowed_token_ids=(3, 4), bad_words_token_ids=((3,), (4, 4)), stop_token_ids=(4,)
    )
    output = llm.beam_search([[5, 6, 7]], params)[0]
    assert output.error is None
    assert [(o.token_ids, o.finish_reason) for o in output.outputs] == [([4], "stop")]
    assert not llm.engine.requests


def test_other_parameters_are_refused_by_their_name() -> None:
    with pytest.raises(RequestError, match="params must be BeamSearchParams"):
        tiny_llm(tiny_folder_once()).beam_search([[5, 6]], SamplingParams())  # type: ignore[arg-type]
