"""The masks of all sequences of a step: cheap grammars are computed together on several threads, others one by one.

    consume    each grammar is fed the tokens that its sequence has got since its last mask: one token each in one call
    compute    llguidance writes the masks straight into rows of one array, which goes to the device as it is
    measure    a joint call that takes much longer than the times of its sequences one by one makes them suspects

Masks that are computed together are not charged to their requests; `GrammarMask` says why budgets hold all the same.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from bifolio.sampling.grammar_mask import MEAN_MASK_SECONDS, GrammarMask
from bifolio.sampling.table import TokenMask

MOST_THREADS = 8


class JointMasks:
    """Computes masks for one engine, on threads that it starts with the first joint call."""

    def __init__(self, num_threads: int | None = None) -> None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.num_threads = min(cores, MOST_THREADS) if num_threads is None else num_threads
        self._executor: Any = None  # an llguidance.LLExecutor

    def fill(self, masks: Sequence[TokenMask], rows: NDArray[np.int32]) -> None:
        """Write the tokens that may follow each sequence to its row: i32[n, words], 32 tokens each, lowest first."""
        together: dict[int, GrammarMask] = {}
        if self.num_threads > 1 and rows.flags.c_contiguous:
            together = {index: mask for index, mask in enumerate(masks) if _joins(mask, rows.shape[1])}
        filled = self._fill_together(together, rows) if len(together) > 1 else set()
        for index, mask in enumerate(masks):
            if index not in filled:
                _put(rows[index], np.asarray(mask.allowed(())))

    def _fill_together(self, masks: dict[int, GrammarMask], rows: NDArray[np.int32]) -> set[int]:
        """Fill the rows of these masks; those of texts that their grammar forbids are left out."""
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(self.num_threads)
        one_by_one = sum(mask.last_seconds for mask in masks.values())
        limit = MEAN_MASK_SECONDS + 2 * one_by_one / self.num_threads
        began, began_cpu = time.perf_counter(), time.process_time()
        jobs = self._consume(masks)
        if jobs:
            self._executor.unsafe_compute_mask_ptr(jobs, rows.ctypes.data, 4 * rows.shape[1], len(rows))
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - began_cpu
        was_slow = min(seconds, cpu_seconds) > limit  # a busy machine alone makes only the first of them large
        for _, index in jobs:
            if not masks[index].joined(was_slow):
                rows[index] = 0
        return {index for _, index in jobs}

    def _consume(self, masks: dict[int, GrammarMask]) -> list[tuple[Any, int]]:
        """(matcher, index) of the masks whose texts their grammars allow, after their new tokens."""
        jobs: list[tuple[Any, int]] = []
        quick: list[tuple[int, GrammarMask, tuple[Any, int]]] = []
        for index, mask in masks.items():
            job = mask.next_job()
            if job is not None:
                quick.append((index, mask, job))
            elif (matcher := mask.advance()) is not None:
                jobs.append((matcher, index))
        allowed = self._executor.consume_token_par([job for _, _, job in quick]) if quick else []
        for (index, mask, (matcher, token)), is_allowed in zip(quick, allowed, strict=True):
            if is_allowed:
                mask.consumed(token)
                jobs.append((matcher, index))
        return jobs


def _joins(mask: TokenMask, num_words: int) -> TypeGuard[GrammarMask]:
    """Whether the mask may be computed with others, straight into a row of so many words."""
    return isinstance(mask, GrammarMask) and mask.joins and mask.num_words == num_words


def _put(row: NDArray[np.int32], mask: NDArray[Any]) -> None:
    """Copy a mask, booleans or bits; tokens beyond its end are not allowed."""
    packed = np.packbits(mask, bitorder="little") if mask.dtype == np.bool_ else mask.view(np.uint8)
    whole = row.view(np.uint8)
    length = min(len(packed), len(whole))
    whole[:length] = packed[:length]
    whole[length:] = 0
