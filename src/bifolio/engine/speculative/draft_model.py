"""Drafts of a small model. Its cache is a second storage on the same block tables: one truncate rolls back both."""

from __future__ import annotations

import time
from collections.abc import Sequence as Sequences

from bifolio.engine.executor import DecodeExecutor, ModelRunner, PrefillExecutor
from bifolio.engine.host_batch import HostBatch, Run
from bifolio.engine.slot_state import SlotState
from bifolio.engine.speculative.drafter import Drafter, Offer
from bifolio.errors import ConfigError
from bifolio.kernels.interface import Batch
from bifolio.model.loaded import TextModel
from bifolio.schedule.plan import ScheduledSequence
from bifolio.sequence import Sequence


class DraftModelDrafter(Drafter):
    """Runs the draft model for the sequences of a step, batched, one draft token at a time.

    Drafts of sampled sequences use the sampling noise of their position, so that where both models agree the draft
    token equals the token that the target model samples.
    """

    def __init__(self, runner: ModelRunner, slots: SlotState, chunk_size: int) -> None:
        self.runner = runner
        self._prefill = PrefillExecutor(runner, chunk_size)
        self._decode = DecodeExecutor(runner)
        self._slots = slots
        self._chunk_size = chunk_size

    def offers(self, sequences: list[Sequence], length: int) -> dict[int, Offer]:
        """Offer `length` drafts; the last two tokens run with the first draft, earlier ones need a catch-up prefill."""
        return {
            sequence.id: Offer(length, 0, max(sequence.num_tokens - sequence.num_draft_computed - 2, 0))
            for sequence in sequences
        }

    def fill(self, items: Sequences[ScheduledSequence], *, on_device: bool = False) -> list[tuple[int, ...]]:
        guesses: list[list[int]] = [[] for _ in items]
        self._catch_up(items)
        while active := [i for i, item in enumerate(items) if len(guesses[i]) < item.num_new - 1]:
            runs = []
            for i in active:
                sequence = items[i].sequence
                known = sequence.token_ids[sequence.num_draft_computed :]
                runs.append(
                    Run(
                        items[i].slot,
                        sequence.num_draft_computed,
                        [*known, *guesses[i][-1:]],
                        sequence.request.rope or 0,
                    )
                )
            for i, token in zip(active, self._draw(items, active, runs, guesses), strict=True):
                sequence = items[i].sequence
                sequence.num_draft_computed = sequence.num_tokens + len(guesses[i])
                guesses[i].append(token)
        return [tuple(guess) for guess in guesses]

    def forget(self, sequence: Sequence) -> None:
        sequence.num_draft_computed = 0

    def _draw(
        self, items: Sequences[ScheduledSequence], active: list[int], runs: list[Run], guesses: list[list[int]]
    ) -> list[int]:
        ends, end = [], 0
        for run in runs:
            end += len(run.tokens)
            ends.append(end - 1)
        started = time.perf_counter()
        logits = self._decode.run(self._lay_out(runs, [], ends))
        positions = [items[i].sequence.num_tokens + len(guesses[i]) for i in active]
        drawn = self._slots.sampler.sample(
            logits, [items[i].slot for i in active], positions, [guesses[i] for i in active]
        )
        self.measured(end, time.perf_counter() - started)
        return [max(int(token), 0) for token in drawn.token_ids]  # a row that cannot be sampled drafts token 0

    def _catch_up(self, items: Sequences[ScheduledSequence]) -> None:
        """Prefill tokens that only the target model has computed: a prompt, or tokens decoded while drafting paused."""
        for item in items:
            sequence = item.sequence
            while sequence.num_tokens - sequence.num_draft_computed > self._chunk_size:
                start = sequence.num_draft_computed
                tokens = sequence.token_ids[start : start + self._chunk_size]
                run = Run(item.slot, start, tokens, sequence.request.rope or 0)
                self._prefill.run(self._lay_out([], [run], [len(tokens) - 1]))
                sequence.num_draft_computed += len(tokens)

    def _lay_out(self, decodes: list[Run], prefills: list[Run], logit_rows: list[int]) -> Batch:
        size = self.runner.storage.block_size
        return HostBatch.from_runs(decodes, prefills, self._slots.tables, size, logit_rows).to(self.runner.kernels)


def check_pair(target: TextModel, draft: TextModel) -> None:
    """Check that both models have the same vocabulary size."""
    if draft.config.recurrent is not None:
        raise ConfigError("a draft model with recurrent layers is not supported: choose another, or method 'ngram'")
    if target.config.vocab_size != draft.config.vocab_size:
        raise ConfigError(
            f"the draft model has {draft.config.vocab_size} tokens and the model {target.config.vocab_size}: a draft "
            "model needs the same tokenizer; choose another, or speculative method 'ngram'"
        )
