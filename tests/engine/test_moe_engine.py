"""Engines on networks with experts and with cached latents: a needle in a crowd, and random lives of an engine."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from test_engine_machine import MAX_MODEL_LEN, EngineMachine
from test_engine_needle import EXACT, NEEDLES, PROMPT, VOCAB, crowded_engine, kernels_named, outcome, run_in_crowd

from bifolio.model.huggingface.hf_loader import load_folder
from bifolio.model.loaded import LoadedModel
from bifolio.sampling_params import SamplingParams
from helpers import cpu_kernel_names, kernels_of_long_runs, make_engine, output_ids, run_alone, tiny_model

NETWORKS = {"experts": "qwen3moe", "latents": "deepseek2", "sinks": "gptoss", "indexers": "glmdsa"}
NUM_TRACES = 8


@cache
def network(name: str) -> LoadedModel:
    return load_folder(tiny_model(NETWORKS[name], vocab_size=VOCAB)[1])


@pytest.mark.full
@pytest.mark.parametrize(
    "kernel_name", kernels_of_long_runs(name for name in cpu_kernel_names() if name in ("reference", *EXACT))
)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_needle_in_a_crowd(name: str, kernel_name: str) -> None:
    """Bit for bit on the native kernels, whatever experts the neighbours choose."""
    kernels, events = kernels_named(kernel_name), 0
    for trace in range(NUM_TRACES):
        rng, needle = np.random.default_rng(trace), list(NEEDLES)[trace % len(NEEDLES)]
        request = run_in_crowd(crowded_engine(rng, kernels, network(name)), needle, rng)
        tokens, logprobs = outcome(request)
        alone = run_alone(PROMPT, NEEDLES[needle], kernels=kernels, model=network(name))
        expected_tokens, expected_logprobs = outcome(alone)
        assert tokens == expected_tokens, f"trace {trace}, {needle}"
        if kernel_name in EXACT:
            assert logprobs == expected_logprobs, f"trace {trace}, {needle}"
        events += request.metrics.num_preemptions + (request.metrics.num_cached_tokens > 0)
    assert events > 0  # preemptions and prefix hits


@cache
def solo(name: str, prompt: tuple[int, ...], options: tuple[tuple[str, Any], ...]) -> tuple[list[list[int]], list[Any]]:
    request = run_alone(prompt, SamplingParams(**dict(options)), max_model_len=MAX_MODEL_LEN, model=network(name))
    return output_ids(request), [sequence.finish_reason for sequence in request.sequences]


def on_network(name: str) -> Any:
    """The state machine of engines on one network; the network is made when the first engine is."""

    def new_engine(**options: Any) -> Any:
        return make_engine(network(name), **options)

    attributes = {"new_engine": staticmethod(new_engine), "solo": staticmethod(partial(solo, name))}
    case = type(f"{name.capitalize()}Machine", (EngineMachine,), attributes).TestCase
    case.settings = settings(
        max_examples=12,
        stateful_step_count=20,
        deadline=None,
        derandomize=True,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    return pytest.mark.full(case)


TestExperts = on_network("experts")
TestLatents = on_network("latents")
TestIndexers = on_network("indexers")
