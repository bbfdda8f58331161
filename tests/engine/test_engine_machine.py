"""The whole engine, driven at random: adds, aborts, steps, priorities and limits in any order.

After every step the block manager's invariants hold; when all is drained no block is in use, everybody has finished,
and everyone who was not aborted has the tokens that the same request gets alone.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from bifolio.config import SpeculativeConfig
from bifolio.errors import RequestError
from bifolio.sampling_params import SamplingParams
from bifolio.sequence import FinishReason, Request, RequestPhase
from helpers import make_engine, output_ids, random_prompt, run_alone, steps

VOCAB, MAX_MODEL_LEN, MAX_WAITING = 61, 40, 6
PROMPTS = [random_prompt(12, seed=s, vocab_size=VOCAB) for s in range(2)]  # few, so that prefixes are found again


@cache
def solo(prompt: tuple[int, ...], options: tuple[tuple[str, Any], ...]) -> tuple[list[list[int]], list[Any]]:
    """Tokens and ends of the request on an engine of its own."""
    request = run_alone(prompt, SamplingParams(**dict(options)), max_model_len=MAX_MODEL_LEN)
    return output_ids(request), [sequence.finish_reason for sequence in request.sequences]


class EngineMachine(RuleBasedStateMachine):
    new_engine = staticmethod(make_engine)  # other kinds of engine live the same life
    solo = staticmethod(solo)

    @initialize(
        block_size=st.sampled_from([1, 3, 4, 16]),
        room=st.sampled_from([1.0, 1.3, 4.0]),
        max_num_seqs=st.integers(3, 5),
        spare_budget=st.integers(0, 20),
        chunk_size=st.integers(1, 16),
        prefix=st.booleans(),
        drafts=st.sampled_from([0, 0, 3]),
    )
    def start(
        self, block_size: int, room: float, max_num_seqs: int, spare_budget: int, chunk_size: int, prefix: bool,
        drafts: int,
    ) -> None:  # fmt: skip
        self.engine = self.new_engine(
            block_size=block_size,
            num_blocks=1 + int(-(-MAX_MODEL_LEN // block_size) * room),
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=max_num_seqs,
            token_budget=max_num_seqs + spare_budget,
            chunk_size=chunk_size,
            enable_prefix_caching=prefix,
            max_waiting=MAX_WAITING,
            speculative=SpeculativeConfig("ngram", length=drafts, adaptive=False) if drafts else None,
        )
        self.requests: dict[str, tuple[Request, tuple[int, ...], tuple[tuple[str, Any], ...]]] = {}
        self.aborted: set[str] = set()
        self.delivered: dict[tuple[str, int], list[int]] = {}
        self.ended: dict[tuple[str, int], FinishReason] = {}

    @rule(
        source=st.integers(0, 1),
        shared=st.integers(0, 12),
        tail=st.lists(st.integers(3, VOCAB - 1), min_size=1, max_size=4),
        n=st.integers(1, 3),
        priority=st.integers(0, 2),
        max_tokens=st.sampled_from([0, 1, 2, 5, 9, None]),
        stop=st.lists(st.integers(3, VOCAB - 1), max_size=12, unique=True),
        seed=st.sampled_from([None, 0, 1, 2]),
        score=st.booleans(),
    )
    def add(
        self, source: int, shared: int, tail: list[int], n: int, priority: int, max_tokens: int | None,
        stop: list[int], seed: int | None, score: bool,
    ) -> None:  # fmt: skip
        prompt = (*PROMPTS[source][:shared], *tail)
        options = (("n", n), ("max_tokens", max_tokens), ("stop_token_ids", tuple(stop)),
                   ("temperature", 0.0 if seed is None else 1.0), ("seed", seed),
                   ("prompt_logprobs", 0 if score else None))  # fmt: skip
        name = f"r{len(self.requests)}"
        waiting = self.engine.batcher.num_waiting
        try:
            request = self.engine.add_request(name, prompt, SamplingParams(**dict(options)), priority=priority)
        except RequestError:
            if waiting < MAX_WAITING:
                raise
            return
        assert waiting < MAX_WAITING
        self.requests[name] = (request, prompt, options)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests)))
        unfinished = not self.requests[name][0].is_finished
        known = self.engine.abort(name)
        assert known or not unfinished
        if unfinished:
            self.aborted.add(name)

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.take(self.engine.step())

    def take(self, results: list[Any]) -> None:
        for result in results:
            key = (result.request_id, result.index)
            assert key not in self.ended, "a result after the end"
            if result.token is not None:
                self.delivered.setdefault(key, []).append(result.token)
            if result.finished:
                self.ended[key] = result.finish_reason

    @invariant()
    def consistent(self) -> None:
        if not hasattr(self, "engine"):
            return
        batcher, blocks = self.engine.batcher, self.engine.blocks
        blocks.check_invariants()
        held = [slot.held for slot in batcher.active_slots()]
        assert len({sequence.id for sequence in held}) == len(held) == batcher.num_running <= batcher.max_slots
        for sequence in held:
            assert 0 <= sequence.num_computed <= sequence.num_tokens, sequence
            assert sequence.num_in_flight == 0 or self.engine.in_flight, sequence
            if sequence.phase is RequestPhase.DECODE:
                assert sequence.num_uncomputed == 1 or sequence.num_in_flight > 1, sequence  # or drafts in flight
            if blocks.has_table(sequence.id):  # between two steps, slots are promised to what is computed or on its way
                promised = blocks.num_tokens_of(sequence.id)
                assert promised == sequence.num_scheduled, sequence
        rows = set(blocks.sequence_ids())
        assert rows <= {sequence.id for sequence in held}  # who has no slot holds no blocks

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for results in steps(self.engine):  # nobody starves: everything ends in a bounded number of steps
            self.take(results)
        assert self.engine.blocks.num_used_blocks == 0
        assert not self.engine.requests
        self.engine.blocks.check_invariants()
        for name, (request, prompt, options) in self.requests.items():
            assert request.is_finished, name
            assert request.error is None, request.error
            expected_tokens, expected_ends = self.solo(prompt, options)
            for sequence, tokens, end in zip(request.sequences, expected_tokens, expected_ends, strict=True):
                key = (name, sequence.index)
                assert self.delivered.get(key, []) == sequence.output_token_ids
                assert self.ended[key] is sequence.finish_reason
                if sequence.finish_reason is FinishReason.ABORT:
                    assert name in self.aborted
                    assert tokens[: len(sequence.output_token_ids)] == sequence.output_token_ids
                else:
                    assert (sequence.output_token_ids, sequence.finish_reason) == (tokens, end), name


TestEngineMachine = pytest.mark.full(EngineMachine.TestCase)
TestEngineMachine.settings = settings(
    max_examples=50,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    phases=(Phase.generate,),  # shrinking whole engine runs takes minutes: add Phase.shrink to study a failure
    suppress_health_check=list(HealthCheck),
)
