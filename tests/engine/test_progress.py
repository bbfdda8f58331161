"""No request keeps an engine from progressing: searches without a prefix cache, and the detector of livelocks."""

from __future__ import annotations

import numpy as np
import pytest

from bifolio import BeamSearchParams, SamplingParams
from bifolio.engine.fault import progress
from bifolio.errors import NO_FINITE_LOGIT
from bifolio.model.huggingface.hf_loader import load_folder
from helpers import drain, make_engine, output_ids, random_prompt, tiny_folder

PLAIN = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)


@pytest.mark.full
@pytest.mark.parametrize("caching", [True, False])
def test_preempted_beams_come_back_without_a_prefix_cache(caching: bool) -> None:
    """Beams that come back share their computed beginnings, so the blocks that admission counted suffice."""
    params = BeamSearchParams(3, max_tokens=14, ignore_eos=True)
    prompts = [random_prompt(11 + n, n, 61) for n in range(4)]
    roomy = make_engine(num_blocks=400, max_num_seqs=16)
    expected = [roomy.add_beam_search(str(n), prompt, params) for n, prompt in enumerate(prompts)]
    drain(roomy)
    tight = make_engine(num_blocks=23, max_model_len=40, max_num_seqs=9, chunk_size=5, token_budget=17,
                        enable_prefix_caching=caching)  # fmt: skip
    searches = [tight.add_beam_search(str(n), prompt, params) for n, prompt in enumerate(prompts)]
    others = [tight.add_request(f"g{n}", prompt, PLAIN) for n, prompt in enumerate(prompts)]
    drain(tight)
    assert any(request.metrics.num_preemptions for request in searches)
    assert [output_ids(request) for request in searches] == [output_ids(request) for request in expected]
    assert all(request.is_finished for request in others)
    assert tight.blocks.num_used_blocks == 0
    tight.blocks.check_invariants()


def test_a_branch_scores_the_whole_prompt() -> None:
    engine = make_engine()
    engine.add_request("talk", random_prompt(9, vocab_size=61), PLAIN)
    engine.keep("talk")
    drain(engine)
    scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2, ignore_eos=True)
    branch = engine.fork("talk", "branch", [5, 6, 7], scored)
    drain(engine)
    engine_alone = make_engine()
    alone = engine_alone.add_request("alone", branch.prompt_token_ids, scored)
    drain(engine_alone)
    assert branch.prompt_logprobs is not None
    assert branch.prompt_logprobs[0] is None
    assert all(item is not None for item in branch.prompt_logprobs[1:])
    assert branch.prompt_logprobs == alone.prompt_logprobs
    engine.release("talk")
    assert engine.blocks.num_used_blocks == 0


def test_a_model_without_finite_logits_is_not_the_clients_fault() -> None:
    engine = make_engine(load_folder(tiny_folder()))  # not the model that other tests share
    runner = engine.runner
    broken = np.full_like(np.asarray(runner.weights.final_norm.weight), np.nan)
    object.__setattr__(runner.weights.final_norm, "weight", broken)
    request = engine.add_request("r", random_prompt(5, vocab_size=61), PLAIN)
    drain(engine)
    assert request.error == NO_FINITE_LOGIT


def test_an_engine_that_is_stuck_names_and_ends_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PATIENCE", 5)
    engine = make_engine()
    first = engine.add_request("first", random_prompt(5, vocab_size=61), PLAIN)
    engine.step()
    blocked = engine.phases.plan
    monkeypatch.setattr(engine.phases, "plan", lambda *args, **options: type(blocked([], 1))())  # plans nothing
    for _ in range(engine.progress.limit + 2):
        engine.step()
    assert first.is_finished
    assert "no progress" in (first.error or "")
    monkeypatch.undo()
    second = engine.add_request("second", random_prompt(5, vocab_size=61), PLAIN)
    drain(engine)
    assert second.error is None
    assert engine.blocks.num_used_blocks == 0
