"""Warm-up of an engine on a GPU: kernels are compiled and decode steps captured before the first request arrives.

Throwaway requests run through the engine, greedy, sampled and with logprobs, short and long, so that every kind of step
occurs: prompts alone, prompts beside decodes, decodes, decodes behind a common prefix. Then the decode steps of every
batch size are captured as CUDA graphs, with and without a common prefix, and the kernels of most other draws compiled.
A network without a language head computes vectors of texts of many lengths instead. The compiler keeps its results on
disk: the first start on a machine takes longest.
"""

from __future__ import annotations

import numpy as np

from bifolio.engine.engine import InferenceEngine
from bifolio.engine.executor import Pass
from bifolio.pooling_params import PoolingParams
from bifolio.sampling_params import SamplingParams

BURSTS = (  # (tokens of a common beginning, further tokens) of prompts that arrive together
    ((0, 3),),
    ((0, 20),),
    ((640, 70),),
    ((0, 1100),),
    ((0, 700),) * 12,  # fill a step
    ((640, 8), (0, 10)),  # the beginning is cached now
    ((640, 40),),
    ((640, 300), (0, 40)),
    ((1024, 4),),
    ((1024, 8),) * 18,  # enough sequences behind one prefix that attention reads it once for all
)
TEXTS = (1, 3, 10, 20, 40, 70, 150, 300, 600, 1100)  # lengths of throwaway texts, in tokens
NUM_TOKENS = 6
SAMPLING = (
    SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False),
    SamplingParams(temperature=0.8, top_p=0.95, seed=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False),
    SamplingParams(top_p=0.95, seed=0, logprobs=2, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False),
)


def warm_up(engine: InferenceEngine) -> None:
    """Run throwaway requests and capture all steps; the engine's counters and its prefix cache start empty."""
    tiers = engine.tiers
    if tiers is not None:
        tiers.detach(engine)
    with engine.runner.kernels.on_padding():
        if engine.model.config.language_head:
            _generate(engine)
        else:
            _compute_vectors(engine)
    engine.blocks.drop_cached()
    engine.reset_stats()
    if tiers is not None:
        tiers.attach(engine)


def _generate(engine: InferenceEngine) -> None:
    """Generate text after prompts of all bursts; then capture all decode steps."""
    vocab_size, longest = engine.model.config.vocab_size, max(engine.config.max_model_len - NUM_TOKENS, 1)
    number = 0
    for params in SAMPLING:
        for burst in BURSTS:
            for common, own in burst:
                number += 1
                _make_room(engine)
                tokens = np.concatenate([np.arange(common), 1000 * number + np.arange(own)])[-longest:] % vocab_size
                engine.add_request(f"warm-up-{number}", tokens.tolist(), params)
            engine.step()
        while engine.has_work:
            engine.step()
    if engine.slots.device is not None:
        engine.slots.device.warm_up()
    if engine.speculator is not None:
        engine.speculator.drafter.warm_up(engine.speculator.policy.longest)


def _compute_vectors(engine: InferenceEngine) -> None:
    """Compute texts: each length alone, all together, and as many of the longest as a step holds."""
    longest, vocab_size = engine.config.max_model_len, engine.model.config.vocab_size
    fitting = max(engine.config.token_budget // longest, 1)
    for number, lengths in enumerate([*((length,) for length in TEXTS), TEXTS, (longest,) * fitting]):
        for index, length in enumerate(lengths):
            _make_room(engine)
            tokens = np.arange(min(length, longest)) % vocab_size
            engine.add_request(f"warm-up-{number}-{index}", tokens.tolist(), PoolingParams())
        while engine.has_work:
            engine.step()
    program = engine.runner.program(Pass.STATES)
    if program is not None:
        program.warm_up(engine.config.token_budget, longest)


def _make_room(engine: InferenceEngine) -> None:
    """Run steps until another request may wait."""
    most = engine.config.max_waiting
    while most is not None and engine.has_work and engine.batcher.num_waiting >= most:
        engine.step()
