"""Random lives of an engine: beams, forks, kept conversations, prompt logprobs and aborts, on pools of every size.

Every output is compared with that of the same request alone on a roomy engine. At the end no block, slot or request is
left, and no request was ended for want of progress.

    PYTHONPATH=src:tests python tests/engine/engine_traces.py --traces 10000 --kernels native
    PYTHONPATH=src:tests python tests/engine/engine_traces.py --traces 2000 --hybrid delta
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any
from unittest import mock

import numpy as np

from bifolio import BeamSearchParams, SamplingParams, SpeculativeConfig
from bifolio.engine.engine import InferenceEngine
from bifolio.errors import RequestError
from bifolio.kernels.interface import KernelSet
from bifolio.schedule import shares
from bifolio.sequence import FinishReason, Request
from helpers import drain, make_engine, make_kernels, output_ids, random_prompt
from hybrid_models import tiny_hybrid

VOCAB, LENGTH = 61, 48
PROMPTS = [random_prompt(14, seed=seed, vocab_size=VOCAB) for seed in range(2)]
LENGTHS = (1, 8, 13, 14)  # few prompts, so that prefixes are found again and the lone answers are computed once
TAILS = ((), (7,))
Options = tuple[tuple[str, Any], ...]


@cache
def kernel_set(name: str) -> KernelSet:
    return make_kernels(name)


@cache
def alone(
    kernels: str, hybrid: str, prompt: tuple[int, ...], kind: str, options: Options
) -> tuple[list[list[int]], list[float]]:
    """Tokens and prompt logprobs of the request on an engine of its own."""
    engine = make_engine(
        tiny_hybrid(hybrid) if hybrid else None,
        kernels=kernel_set(kernels),
        num_blocks=400,
        max_model_len=LENGTH,
        max_num_seqs=8,
        chunk_size=64,
        token_budget=64,
        enable_prefix_caching=not hybrid,
    )
    request = start(engine, "alone", prompt, kind, options)
    drain(engine)
    return output_ids(request), logprobs(request)


def start(
    engine: InferenceEngine, name: str, prompt: tuple[int, ...], kind: str, options: Options, owner: str = ""
) -> Request:
    if kind == "beam":
        return engine.add_beam_search(name, prompt, BeamSearchParams(**dict(options)), owner=owner)
    return engine.add_request(name, prompt, SamplingParams(**dict(options)), owner=owner)


def logprobs(request: Request) -> list[float]:
    """Those of the prompt's tokens; the first has none and counts as 99."""
    return [99.0 if item is None else item.logprob for item in request.prompt_logprobs or ()]


class Trace:
    """One life, decided by a seed."""

    def __init__(self, seed: int, kernels: str = "reference", hybrid: str = "") -> None:
        """`hybrid`: the recurrence of a hybrid model, on pools of states of every size; else a dense model."""
        self.rng = rng = random.Random(seed)
        self.kernels, self.hybrid = kernels, hybrid
        size = rng.choice([1, 2, 4, 8])
        self.engine = make_engine(
            tiny_hybrid(hybrid) if hybrid else None,
            **(self._states(random.Random(~seed), size) if hybrid else {}),
            kernels=kernel_set(kernels),
            block_size=size,
            num_blocks=2 + int(-(-LENGTH // size) * rng.choice([1.0, 1.2, 1.5, 2.0, 3.0, 6.0])),
            max_model_len=LENGTH,
            max_num_seqs=rng.randint(4, 6),
            token_budget=rng.randint(6, 40),
            chunk_size=rng.randint(1, 16),
            enable_prefix_caching=rng.random() < 0.5,
            launch_ahead=rng.choice([0, 0, 1]),
        )
        self.owners = rng.choice([("",), ("a", "b"), ("", "a", "a", "b")])
        self.requests: dict[str, tuple[Request, tuple[int, ...], str, Options]] = {}
        self.aborted: set[str] = set()
        self.kept: set[str] = set()
        self.counts: Counter[str] = Counter()

    def _states(self, rng: random.Random, size: int) -> dict[str, Any]:
        """As few states as 6 sequences need, or some more; checkpoints close to each other, or far."""
        drafts = rng.choice([0, 0, 2])
        speculative = SpeculativeConfig("ngram", length=drafts, adaptive=False) if drafts else None
        return {
            "num_states": 2 + 6 * (2 + drafts) + rng.choice([0, 1, 2, 5, 40]),
            "checkpoint_tokens": size * rng.choice([1, 2, 3, 64]),
            "speculative": speculative,
        }

    def run(self, num_actions: int = 40) -> list[str]:
        """Live, end and be checked: every fault in a sentence. Owners yield slots without patience."""
        with mock.patch.multiple(shares, PATIENCE=0.0, INTERVAL=0.0):
            self._live(num_actions)
        self.counts["preemptions"] = self.engine.stats().num_preemptions
        return self.faults()

    def _live(self, num_actions: int) -> None:
        actions = [self.add, self.add, self.search, self.fork, self.abort, self.step, self.step, self.step]
        for _ in range(num_actions):
            self.rng.choice(actions)()
        drain(self.engine, 20_000)
        for name in list(self.kept):
            self.engine.release(name)

    # -- actions -------------------------------------------------------------------------------------------------------
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
        if held is None:
            return
        tail = self.rng.choice([(7, 9), (40, 3)])
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
        self.counts["forks"] += 1

    def abort(self) -> None:
        running = [name for name, (request, *_) in self.requests.items() if not request.is_finished]
        if running and self.rng.random() < 0.5:
            name = self.rng.choice(running)
            self.engine.abort(name)
            self.aborted.add(name)
            self.counts["aborts"] += 1

    def step(self) -> None:
        for _ in range(self.rng.randint(1, 6)):
            self.engine.step()
            self.engine.blocks.check_invariants()

    # -- the end -------------------------------------------------------------------------------------------------------
    def faults(self) -> list[str]:
        """Requests that did not end as they do alone, and all that is left in the engine."""
        found: list[str] = []
        for name, (request, prompt, kind, options) in self.requests.items():
            if not request.is_finished:
                found.append(f"{name} is not finished")
            elif request.error is not None:
                found.append(f"{name} ended with the error {request.error}")
            else:
                found += self._differences(name, request, prompt, kind, options)
        engine = self.engine
        left = {
            "blocks": engine.blocks.num_used_blocks,
            "states": engine.stats().states.num_held_states,
            "requests": len(engine.requests),
            "running sequences": engine.batcher.num_running,
            "waiting sequences": engine.batcher.num_waiting,
        }
        engine.blocks.check_invariants()
        return found + [f"{count} {kind} are left" for kind, count in left.items() if count]

    def _differences(
        self, name: str, request: Request, prompt: tuple[int, ...], kind: str, options: Options
    ) -> Iterator[str]:
        """Between the request and the same request alone."""
        tokens, scores = alone(self.kernels, self.hybrid, prompt, kind, options)
        if name in self.aborted:  # its sequences stop anywhere; a search has no texts before its end
            pairs = zip(request.sequences, tokens, strict=True) if kind == "plain" else ()
            for sequence, expected in pairs:
                found = list(sequence.output_token_ids)
                if found != expected[: len(found)]:
                    yield f"{name}, aborted: {found} is no beginning of {expected}"
                if sequence.finish_reason not in (FinishReason.ABORT, FinishReason.LENGTH):
                    yield f"{name}, aborted: finish reason {sequence.finish_reason}"
            return
        if output_ids(request) != tokens:
            yield f"{name}: {output_ids(request)} instead of {tokens}"
        found_scores = logprobs(request)
        is_same = found_scores == scores
        if self.kernels == "reference" and len(found_scores) == len(scores):  # numpy rounds products by their shape
            is_same = np.allclose(found_scores, scores, rtol=1e-7, atol=1e-4)
        if not is_same:
            yield f"{name}: prompt logprobs {found_scores} instead of {scores}"

    # -- details -------------------------------------------------------------------------------------------------------
    def _prompt(self) -> tuple[int, ...]:
        return (*self.rng.choice(PROMPTS)[: self.rng.choice(LENGTHS)], *self.rng.choice(TAILS))

    def _start(self, prompt: tuple[int, ...], kind: str, options: Options, keep: bool = False) -> None:
        name = f"r{len(self.requests)}"
        try:
            request = start(self.engine, name, prompt, kind, options, self.rng.choice(self.owners))
        except RequestError:
            return  # cannot fit into this pool
        self.requests[name] = (request, prompt, kind, options)
        self.counts["searches" if kind == "beam" else "requests"] += 1
        if keep:
            self.engine.keep(name)
            self.kept.add(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=int, default=10_000, help="number of traces")
    parser.add_argument("--first", type=int, default=0, help="seed of the first")
    parser.add_argument("--kernels", default="reference", help="kernel set (reference or native)")
    parser.add_argument("--hybrid", default="", help="recurrence of a hybrid model: conv, delta or mamba")
    arguments = parser.parse_args()
    began, total, failures = time.monotonic(), Counter[str](), []
    for seed in range(arguments.first, arguments.first + arguments.traces):
        trace = Trace(seed, arguments.kernels, arguments.hybrid)
        try:
            faults = trace.run()
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            faults = [f"{type(error).__name__}: {error} ({last.name}, line {last.lineno})"]
        total += trace.counts
        if faults:
            failures.append(seed)
            print(f"seed {seed}: {'; '.join(faults)}", flush=True)
        done = seed - arguments.first + 1
        if not done % 250:
            print(f"{done} traces, {len(failures)} failures, {time.monotonic() - began:.0f} s", flush=True)
    summary = {"traces": arguments.traces, "failures": failures, "seconds": round(time.monotonic() - began), **total}
    print(
        json.dumps(
            {"kernels": arguments.kernels, "hybrid": arguments.hybrid, "first": arguments.first, **summary}, indent=2
        )
    )
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
