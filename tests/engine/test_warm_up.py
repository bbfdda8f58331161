"""Warm-up leaves no trace: the first real request finds empty counters and an empty prefix cache."""

from __future__ import annotations

import numpy as np
import pytest

from bifolio.engine.warm_up import BURSTS, warm_up
from bifolio.sampling_params import SamplingParams
from bifolio.schedule.plan import StepPlan
from helpers import drain, make_engine, output_ids

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.mark.full
def test_warm_up_runs_every_kind_of_step_and_leaves_nothing() -> None:
    engine = make_engine(max_num_seqs=4)
    kinds: list[tuple[bool, bool]] = []
    launch = engine.launch

    def watched(plan: StepPlan):  # type: ignore[no-untyped-def]
        kinds.append((bool(plan.prefills), bool(plan.decodes)))
        return launch(plan)

    engine.launch = watched  # type: ignore[method-assign]
    warm_up(engine)
    assert set(kinds) == {(True, False), (True, True), (False, True)}
    stats = engine.stats()
    assert (stats.num_steps, stats.num_prompt_tokens, stats.num_cached_tokens, stats.num_decode_tokens) == (0, 0, 0, 0)
    assert stats.num_used_blocks == 0
    assert not engine.has_work

    prompt = (np.arange(60) % engine.model.config.vocab_size).tolist()  # the prompts of the warm-up begin like this
    results = []
    for each in (engine, make_engine(max_num_seqs=4)):
        request = each.add_request("first", prompt, GREEDY)
        drain(each)
        results.append(output_ids(request))
        assert request.metrics.num_cached_tokens == 0
    assert results[0] == results[1]


@pytest.mark.full
@pytest.mark.parametrize("limits", [{"max_model_len": 40}, {"max_model_len": 8}, {"max_waiting": 1, "max_num_seqs": 2}])
def test_warm_up_keeps_to_the_limits_of_the_engine(limits: dict[str, int]) -> None:
    """Prompts are cut to the model's length; a short queue takes one request after the other."""
    assert max(common + own for burst in BURSTS for common, own in burst) > 40
    assert max(map(len, BURSTS)) > 2
    engine = make_engine(**limits)
    warm_up(engine)
    assert engine.stats().num_used_blocks == 0
    assert not engine.has_work
