"""A beam search inside the running batch: beams are sequences, and reordering them moves table entries, never K/V.

All beams of a request hold a slot from admission to the end. Beams with a running hypothesis are *live*; when one is
dropped and another continues twice, the dropped beam's blocks are released and its table is forked from the other's
(`BeamSearchBlockSharing`).
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Sequences
from functools import partial
from typing import Any

import numpy as np

from bifolio.beam_params import BeamSearchParams
from bifolio.cache.sharing import BeamSearchBlockSharing
from bifolio.engine.beam.hypotheses import (
    BeamGroup,
    Candidate,
    Ending,
    Hypothesis,
    best_candidates,
    diversity_penalties,
    log_normalisers,
)
from bifolio.sampling.logprobs import score_tokens
from bifolio.sampling.sampler import Sampler, no_token_error
from bifolio.sampling.weights import cleaned
from bifolio.sequence import BeamStep, FinishReason, Request, Sequence, TokenLogprob


class BeamSearch:
    """The beam search of one request; also the group of its sequences."""

    def __init__(
        self,
        request: Request,
        params: BeamSearchParams,
        eos_token_ids: Sequences[int],
        new_reader: Callable[[], Any],  # a reader at the start of a text; None: there is no text
        sharing: BeamSearchBlockSharing,
    ) -> None:
        self._new_reader = new_reader
        self._sharing = sharing
        self.request = request
        self.params = params
        self.members: list[Sequence] = request.sequences
        self.end_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else set(eos_token_ids))
        width = params.beam_width // params.num_groups
        self.groups = [
            BeamGroup(params, width, len(self.end_ids), request.max_tokens) for _ in range(params.num_groups)
        ]
        self.beams: list[list[Sequence]] = [[self.members[0]] for _ in self.groups]  # of each group, best first
        self._done = [False] * len(self.groups)

    # -- as a group of sequences ----------------------------------------------------------------------------------
    def live(self) -> list[Sequence]:
        unique = {sequence.id: sequence for beams in self.beams for sequence in beams}
        return list(unique.values())

    def is_live(self, sequence: Sequence) -> bool:
        return any(sequence is beam for beams in self.beams for beam in beams)

    def is_ready(self) -> bool:
        return all(sequence.num_uncomputed == 1 for sequence in self.live())

    def may_open(self, sequence: Sequence) -> bool:
        for beam in self.live():
            if beam is sequence:
                return True
            if beam.num_uncomputed > 1:
                return False
        return False

    # -- one step -------------------------------------------------------------------------------------------------
    @property
    def is_done(self) -> bool:
        return all(self._done)

    @property
    def num_candidates(self) -> int:
        """The number of each beam's most likely tokens that a step needs."""
        return max(group.num_candidates for group in self.groups)

    def needs_all_logits(self, slots: dict[int, int], sampler: Sampler) -> bool:
        """Whether a step needs more than the model's top logprobs."""
        edited = any(sampler.table.is_edited[slot] for slot in slots.values())
        return edited or self.params.logprobs is not None or bool(self.params.diversity_penalty)

    def advance(
        self,
        logits: np.ndarray,
        slots: dict[int, int],
        sampler: Sampler,
        ids: np.ndarray | None = None,
    ) -> None:
        """Take the logits of all live beams, f32[b, vocab] in the order of `live`, and choose the next beams.

        With `ids`, i64[b, k], they are logprobs f32[b, k] of only the k most likely tokens of each beam. Raises if the
        search is over and has no hypothesis.
        """
        rows = {sequence.id: row for row, sequence in enumerate(self.live())}
        table = np.array([slots[sequence.id] for sequence in self.live()], dtype=np.int64)
        logprobs = logits
        if ids is None:
            known, _ = cleaned(logits)
            logprobs = sampler.edit(known - log_normalisers(known), table)
        chosen: list[int] = []
        moves: list[tuple[int, list[Candidate], list[tuple[Candidate, Hypothesis]]]] = []
        for number, group in enumerate(self.groups):
            if self._done[number]:
                continue
            beams = self.beams[number]
            scores = logprobs[[rows[beam.id] for beam in beams]]
            if chosen and self.params.diversity_penalty:
                scores = scores + diversity_penalties(chosen, scores.shape[1], self.params.diversity_penalty)
            candidates = best_candidates(scores, group.scores, group.num_candidates)
            if ids is not None:
                candidates = [c._replace(token=int(ids[rows[beams[c.beam].id], c.token])) for c in candidates]
            running, finished, done = group.advance(candidates, partial(self._ending, beams))
            self._done[number] = done
            chosen.extend(candidate.token for candidate in running)
            self._note_finished(beams, finished, logits, rows)
            moves.append((number, [] if done else running, finished))
        self._record(moves)
        if self.is_done and not self.results():
            raise no_token_error(logits)
        self._move(moves, logits, rows, sampler, slots)

    def _record(self, moves: list[tuple[int, list[Candidate], list[tuple[Candidate, Hypothesis]]]]) -> None:
        """Note the chosen beams, where a client watches the search."""
        if self.request.steps is None:
            return
        chosen = []
        for number, running, finished in moves:
            first = sum(len(beams) for beams in self.beams[:number])
            for candidate, ended in [(c, False) for c in running] + [(c, True) for c, _ in finished]:
                chosen.append((first + candidate.beam, candidate.token, candidate.score, ended))
        position = max(group.num_steps for group in self.groups) - 1
        self.request.steps.append(BeamStep(position, tuple(chosen)))

    def _ending(self, beams: list[Sequence], candidate: Candidate) -> Ending | None:
        beam = beams[candidate.beam]
        if self.params.stop:
            decision = beam.reader.peek(candidate.token)
            if decision.finish_reason is None:
                return None
            return Ending(decision.finish_reason, decision.stop_reason)
        if candidate.token in self.end_ids and len(beam.output_token_ids) >= self.params.min_tokens:
            stop_id = candidate.token if candidate.token in self.params.stop_token_ids else None
            return Ending("stop", stop_id)
        return Ending("length") if len(beam.output_token_ids) + 1 >= self.request.max_tokens else None

    def _note_finished(
        self,
        beams: list[Sequence],
        finished: list[tuple[Candidate, Hypothesis]],
        logits: np.ndarray,
        rows: dict[int, int],
    ) -> None:
        for candidate, hypothesis in finished:
            beam = beams[candidate.beam]
            hypothesis.token_ids = [*beam.output_token_ids, candidate.token]
            hypothesis.logprobs = beam.logprobs.copy()
            hypothesis.logprobs.extend(self._logprob(logits[rows[beam.id]], candidate.token))

    def _logprob(self, logits: np.ndarray, token: int) -> list[TokenLogprob]:
        if self.params.logprobs is None:
            return []
        scored = score_tokens(logits[None], np.array([token]), np.array([self.params.logprobs]))
        return [TokenLogprob(token, float(scored.logprobs[0]), int(scored.ranks[0]), tuple(scored.top[0] or ()))]

    # -- block tables -------------------------------------------------------------------------------------------------
    def _move(
        self,
        moves: list[tuple[int, list[Candidate], list[tuple[Candidate, Hypothesis]]]],
        logits: np.ndarray,
        rows: dict[int, int],
        sampler: Sampler,
        slots: dict[int, int],
    ) -> None:
        """Give every next beam a table: the first child of a beam keeps its table, others fork it."""
        steps = [(number, self.beams[number][c.beam], c) for number, running, _ in moves for c in running]
        parents = {parent.id for _, parent, _ in steps}
        spare = [member for member in self.members if member.id not in parents]
        dropped = [member.id for member in spare]
        taken: set[int] = set()
        forks: list[tuple[Sequence, Sequence]] = []
        placed: list[tuple[int, Sequence, Candidate, list[TokenLogprob]]] = []
        for number, parent, candidate in steps:
            logprob = self._logprob(logits[rows[parent.id]], candidate.token)
            child = parent
            if parent.id in taken:
                child = spare.pop()
                forks.append((parent, child))
            taken.add(parent.id)
            placed.append((number, child, candidate, logprob))
        self._share_blocks(dropped, forks)
        for parent, child in forks:
            child.fork_from(parent)
            child.logprobs = parent.logprobs.copy()
            child.reader = None if parent.reader is None else parent.reader.fork()
        self.beams = [[] for _ in self.groups]
        for number, child, candidate, logprob in placed:  # after the forks, which copy the state before this token
            child.append_token(candidate.token)
            child.cumulative_logprob = candidate.score
            child.logprobs.extend(logprob)
            if self.params.stop:
                child.reader.check(candidate.token)
            sampler.table.restart_history(slots[child.id])
            self.beams[number].append(child)

    def _share_blocks(self, dropped: list[int], forks: list[tuple[Sequence, Sequence]]) -> None:
        base = self.members[0]
        if not base.output_token_ids and forks:  # the first step: all beams branch off the prompt
            self._sharing.initialize_beams(base.id, base.num_computed, [child.id for _, child in forks])
        else:
            self._sharing.reorder_beams(dropped, [(parent.id, child.id) for parent, child in forks])

    # -- the end --------------------------------------------------------------------------------------------------
    def results(self) -> list[Hypothesis]:
        """The best finished texts, best first."""
        every = sorted((h for group in self.groups for h in group.finished), key=lambda h: -h.score)
        return every[: self.params.num_returned]

    def close(self) -> None:
        """Release the beams' blocks and turn the members into the returned completions."""
        forked = [member.id for member in self.members if self._sharing.get_beam_info(member.id) is not None]
        self._sharing.cleanup_beams(forked)  # the first one's blocks are released with its slot
        results = self.results()
        for member in self.members[len(results) :]:
            member.finish(FinishReason.STOP)
        for index, (member, hypothesis) in enumerate(zip(self.members, results, strict=False)):
            member.index = index
            member.output_token_ids[:] = hypothesis.token_ids
            member.token_ids = [*self.request.prompt_token_ids, *hypothesis.token_ids]
            member.cumulative_logprob = hypothesis.cumulative_logprob
            member.logprobs = hypothesis.logprobs
            member.score = hypothesis.score
            member.stop_reason = hypothesis.stop_reason
            member.reader = self._new_reader()
            member.finish(FinishReason(hypothesis.finish_reason))
