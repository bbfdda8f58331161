"""`ReadPrompts`: the prompts that are being computed, for the admission of further requests."""

from __future__ import annotations

from typing import Any

from bifolio.cache.block_manager import KVCacheBlockManager
from bifolio.sequence import Sequence


class ReadPrompts:
    """The prompts in prefill: the blocks they still need, and the prefixes they will cache.

    Built once for all admissions between two steps and updated with each: comparing every new request with every
    running sequence would take longer than the step when hundreds of requests arrive together.
    """

    def __init__(self, running: list[Sequence], blocks: KVCacheBlockManager) -> None:
        self._blocks = blocks
        self._tokens: list[tuple[int, int]] = []  # (sequence id, tokens without a block yet)
        self._prefixes: dict[tuple[Any, ...], list[list[int]]] = {}  # by `_prefix_key`
        self._ends: set[int] = set()  # the numbers of tokens in the keys above
        for sequence in running:
            self._note(sequence)
        self._num_blocks = blocks.blocks_needed(self._tokens)

    def _note(self, sequence: Sequence) -> None:
        blocks, size = self._blocks, self._blocks.block_size
        if sequence.num_uncomputed > 1 and blocks.has_table(sequence.id):
            self._tokens.append((sequence.id, sequence.num_tokens - blocks.num_tokens_of(sequence.id)))
        if not sequence.is_dormant and sequence.num_uncomputed > size:
            end = sequence.num_scheduled // size * size + size  # the next block that it will complete
            self._ends.add(end)
            self._prefixes.setdefault(_prefix_key(sequence, end), []).append(sequence.token_ids)

    def will_know_prefix(self, sequence: Sequence) -> bool:
        """Whether a running prefill computes a prefix that this sequence shares, so that waiting saves work."""
        request, tokens, count = sequence.request, sequence.token_ids, sequence.num_tokens
        if not self._blocks.enable_prefix_caching or request.params.prompt_logprobs is not None:
            return False
        return any(
            other[:end] == tokens[:end]
            for end in self._ends
            if end < count
            for other in self._prefixes.get(_prefix_key(sequence, end), ())
        )

    def blocks_with(self, sequence: Sequence, cached: int) -> int:
        """Blocks that these prompts and the rest of this one need together; its table is open."""
        own = (sequence.id, sequence.num_tokens - cached)
        if cached % self._blocks.block_size:  # a shared last block: the moves depend on all sharers
            return self._blocks.blocks_needed([*self._tokens, own])
        return self._num_blocks + self._blocks.blocks_needed([own])

    def add(self, sequence: Sequence, num_blocks: int) -> None:
        """Record an admitted sequence; all prompts together now need `num_blocks`."""
        known = len(self._tokens)
        self._note(sequence)
        if len(self._tokens) > known:
            self._num_blocks = num_blocks


def _prefix_key(sequence: Sequence, end: int) -> tuple[Any, ...]:
    """Equal for prefixes of `end` tokens that may be equal; the tokens before the last one are compared."""
    request = sequence.request
    return request.cache_salt, end, sequence.token_ids[end - 1], request.marks_until(end)
