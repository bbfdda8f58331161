"""Random lives of an engine: beams, forks, kept conversations, prompt logprobs and aborts, on pools of every size.

Every output is compared with that of the same request alone on a roomy engine; at the end no block is in use and no
request was ended for want of progress. `pytest -m slow` runs thousands of traces.
"""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest

from bifolio import BeamSearchParams, SamplingParams
from bifolio.engine.engine import InferenceEngine
from bifolio.errors import RequestError
from bifolio.sequence import FinishReason, Request
from helpers import drain, make_engine, output_ids, random_prompt

VOCAB, LENGTH = 61, 48
PROMPTS = [random_prompt(14, seed=seed, vocab_size=VOCAB) for seed in range(3)]
Options = tuple[tuple[str, Any], ...]


@cache
def alone(prompt: tuple[int, ...], kind: str, options: Options) -> tuple[list[list[int]], list[Any] | None]:
    engine = make_engine(num_blocks=400, max_model_len=LENGTH, max_num_seqs=8, chunk_size=64, token_budget=64)
    request = start(engine, "alone", prompt, kind, options)
    drain(engine)
    return output_ids(request), request.prompt_logprobs


def start(engine: InferenceEngine, name: str, prompt: tuple[int, ...], kind: str, options: Options) -> Request:
    if kind == "beam":
        return engine.add_beam_search(name, prompt, BeamSearchParams(**dict(options)))
    return engine.add_request(name, prompt, SamplingParams(**dict(options)))


def logprobs(scores: list[Any] | None) -> list[float]:
    """Those of the tokens but the first, which has none; numpy rounds products of other shapes in other ways."""
    return [] if scores is None else [99.0 if item is None else item.logprob for item in scores]


class Trace:
    """One life, decided by a seed."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        size = rng.choice([1, 2, 4, 8])
        self.engine = make_engine(
            block_size=size,
            num_blocks=2 + int(-(-LENGTH // size) * rng.choice([1.2, 2.0, 3.0, 6.0])),
            max_model_len=LENGTH,
            max_num_seqs=rng.randint(4, 6),
            token_budget=rng.randint(6, 40),
            chunk_size=rng.randint(1, 16),
            enable_prefix_caching=rng.random() < 0.5,
        )
        self.requests: dict[str, tuple[Request, tuple[int, ...], str, Options]] = {}
        self.aborted: set[str] = set()
        self.kept: set[str] = set()

    def run(self, num_actions: int = 40) -> None:
        actions = [self.add, self.add, self.search, self.fork, self.abort, self.step, self.step, self.step]
        for _ in range(num_actions):
            self.rng.choice(actions)()
        drain(self.engine, 20_000)
        for name in list(self.kept):
            self.engine.release(name)
        self.check()

    def add(self) -> None:
        rng = self.rng
        seed = rng.choice([None, 1, 2])
        options = (
            ("n", rng.choice([1, 1, 2, 3])),
            ("max_tokens", rng.choice([1, 4, 9, 14])),
            ("temperature", 0.0 if seed is None else 0.9),
            ("seed", seed),
            ("ignore_eos", True),
            ("prompt_logprobs", rng.choice([None, None, 1])),
        )
        self._start(self._prompt(), "plain", options, keep=rng.random() < 0.3)

    def search(self) -> None:
        rng = self.rng
        options = (("beam_width", rng.choice([2, 3, 4])), ("max_tokens", rng.choice([3, 8, 12])), ("ignore_eos", True))
        self._start(self._prompt(), "beam", options)

    def fork(self) -> None:
        ready = [name for name in sorted(self.kept) if self.engine.batcher.kept(name) is not None]
        if not ready:
            return
        parent = self.rng.choice(ready)
        held = self.engine.batcher.kept(parent)
        assert held is not None
        tail = [self.rng.randrange(3, VOCAB) for _ in range(2)]
        prompt = (*held.token_ids, *tail)
        options = (
            ("max_tokens", 3),
            ("temperature", 0.0),
            ("ignore_eos", True),
            ("prompt_logprobs", self.rng.choice([None, 1])),
        )
        name = f"r{len(self.requests)}"
        try:
            request = self.engine.fork(parent, name, tail, SamplingParams(**dict(options)))
        except RequestError:
            return  # too long
        self.requests[name] = (request, prompt, "plain", options)

    def abort(self) -> None:
        running = [name for name, (request, *_) in self.requests.items() if not request.is_finished]
        if running and self.rng.random() < 0.5:
            name = self.rng.choice(running)
            self.engine.abort(name)
            self.aborted.add(name)

    def step(self) -> None:
        for _ in range(self.rng.randint(1, 6)):
            self.engine.step()
            self.engine.blocks.check_invariants()

    def check(self) -> None:
        for name, (request, prompt, kind, options) in self.requests.items():
            assert request.is_finished, name
            if name in self.aborted and request.sequences[0].finish_reason is FinishReason.ABORT:
                continue
            assert request.error is None, (name, request.error)
            if name in self.aborted:
                continue  # some of its sequences ended before the abort
            tokens, scores = alone(prompt, kind, options)
            assert output_ids(request) == tokens, name
            assert logprobs(request.prompt_logprobs) == pytest.approx(logprobs(scores), abs=1e-4), name
        assert self.engine.blocks.num_used_blocks == 0
        self.engine.blocks.check_invariants()

    def _prompt(self) -> tuple[int, ...]:
        source = self.rng.choice(PROMPTS)
        tail = [self.rng.randrange(3, VOCAB) for _ in range(self.rng.randint(0, 1))]
        return (*source[: self.rng.randint(1, len(source))], *tail)

    def _start(self, prompt: tuple[int, ...], kind: str, options: Options, keep: bool = False) -> None:
        name = f"r{len(self.requests)}"
        try:
            request = start(self.engine, name, prompt, kind, options)
        except RequestError:
            return  # cannot fit into this pool
        self.requests[name] = (request, prompt, kind, options)
        if keep:
            self.engine.keep(name)
            self.kept.add(name)


@pytest.mark.full
@pytest.mark.parametrize("first", range(0, 40, 8))
def test_random_traces(first: int) -> None:
    for seed in range(first, first + 8):
        Trace(seed).run()


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 11_000, 250))
def test_ten_thousand_random_traces(first: int) -> None:
    for seed in range(first, first + 250):
        Trace(seed).run()
