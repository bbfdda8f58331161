"""Warm-up of an engine on a GPU: kernels are compiled and decode steps captured before the first request arrives.

Throwaway requests run through the engine, greedy, sampled and with logprobs, short and long, so that every kind of step
occurs: prompts alone, prompts beside decodes, decodes, decodes behind a common prefix. Then the decode steps of every
batch size are captured as CUDA graphs, with and without a common prefix, and the kernels of most other draws compiled.
The compiler keeps its results on disk: the first start on a machine takes longest.
"""

from __future__ import annotations

import numpy as np

from bifolio.engine.engine import InferenceEngine
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
NUM_TOKENS = 6
SAMPLING = (
    SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False),
    SamplingParams(temperature=0.8, top_p=0.95, seed=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False),
    SamplingParams(top_p=0.95, seed=0, logprobs=2, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False),
)


def warm_up(engine: InferenceEngine) -> None:
    """Run throwaway requests and capture all decode steps; the engine's counters and its prefix cache start empty."""
    vocab_size, longest = engine.model.config.vocab_size, max(engine.config.max_model_len - NUM_TOKENS, 1)
    most_waiting = engine.config.max_waiting
    number = 0
    tiers = engine.tiers
    if tiers is not None:
        tiers.detach(engine)
    for params in SAMPLING:
        for burst in BURSTS:
            for common, own in burst:
                number += 1
                while most_waiting is not None and engine.has_work and engine.batcher.num_waiting >= most_waiting:
                    engine.step()
                tokens = np.concatenate([np.arange(common), 1000 * number + np.arange(own)])[-longest:] % vocab_size
                engine.add_request(f"warm-up-{number}", tokens.tolist(), params)
            engine.step()
        while engine.has_work:
            engine.step()
    if engine.slots.device is not None:
        engine.slots.device.warm_up()
    if engine.speculator is not None:
        engine.speculator.drafter.warm_up(engine.speculator.policy.longest)
    engine.blocks.drop_cached()
    engine.reset_stats()
    if tiers is not None:
        tiers.attach(engine)
