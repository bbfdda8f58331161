"""Embeddings: hidden states of a text, averaged over its tokens, of length 1.

A text runs through the same paged cache as everything else, one chunk between two steps, so that a long one does not
hold up the requests that are being generated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from bifolio.cache.storage import KvCacheEntry
from bifolio.engine.engine import InferenceEngine
from bifolio.errors import NO_FINITE_STATE, EmptyPromptError, ModelOutputError, PromptTooLongError, TokenIdError
from bifolio.kernels.interface import Array, Batch

Done = Callable[[np.ndarray | None, Exception | None], None]


class EmbeddingQueue:
    """Texts that wait to be embedded, and the one that is being computed. Lives on the engine's thread."""

    def __init__(self, engine: InferenceEngine) -> None:
        self._engine = engine
        self._waiting: deque[tuple[str, list[int], Done]] = deque()
        self._active: _Job | None = None

    def add(self, request_id: str, token_ids: list[int], done: Done) -> None:
        config = self._engine.config
        if not token_ids:
            raise EmptyPromptError("the input is empty: pass at least one token")
        if len(token_ids) > config.max_model_len:
            raise PromptTooLongError(
                f"the input has {len(token_ids)} tokens and {config.max_model_len} fit: shorten it"
            )
        vocab = self._engine.model.config.vocab_size
        for token in token_ids:
            if not 0 <= token < vocab:
                raise TokenIdError(
                    f"the token id {token} is outside the vocabulary of {vocab} tokens: pass ids from 0 to {vocab - 1}"
                )
        self._waiting.append((request_id, token_ids, done))

    def abort(self, request_id: str) -> None:
        self._waiting = deque(item for item in self._waiting if item[0] != request_id)
        if self._active is not None and self._active.request_id == request_id:
            self._active.close()
            self._active = None

    def advance(self) -> bool:
        """Compute one chunk; True while there is more to do."""
        if self._active is None:
            if not self._waiting:
                return False
            if not self._may_start(len(self._waiting[0][1])):
                return self._engine.has_work or self._make_room()
            self._active = _Job(self._engine, *self._waiting.popleft())
        job = self._active
        try:
            vector = job.advance()
        except Exception as error:  # only this text fails
            job.close()
            self._active = None
            job.done(None, error)
        else:
            if vector is not None:
                job.close()
                self._active = None
                job.done(vector, None)
        return self._active is not None or bool(self._waiting)

    def _may_start(self, num_tokens: int) -> bool:
        """All of its blocks at once, so that it always gets to its end; one for each running sequence is left."""
        blocks = self._engine.blocks
        needed = blocks.blocks_for(num_tokens)
        spare = self._engine.batcher.num_running
        return needed + spare <= blocks.num_free_blocks or (not spare and needed <= blocks.num_free_blocks)

    def _make_room(self) -> bool:
        """Drop a kept conversation: no request runs, and kept conversations hold the blocks."""
        return self._engine.batcher.drop_kept()


class _Job:
    """One text on its way through the network, a chunk at a time, on the engine's `PrefillExecutor`."""

    def __init__(self, engine: InferenceEngine, request_id: str, token_ids: list[int], done: Done) -> None:
        self.request_id = request_id
        self.done = done
        self._runner = engine.runner
        self._sum = np.zeros(engine.model.config.hidden_size, dtype=np.float64)
        self._entry = KvCacheEntry.open(engine.runner.storage, engine.blocks, len(token_ids))
        self._chunks = engine.prefill_executor.chunks(token_ids, self._entry, self._states)
        self._num_left = -(-len(token_ids) // engine.prefill_executor.chunk_size)

    def advance(self) -> np.ndarray | None:
        """One chunk; the finished vector after the last."""
        self._sum += np.asarray(self._runner.kernels.to_host(next(self._chunks)), dtype=np.float64).sum(axis=0)
        self._num_left -= 1
        if self._num_left:
            return None
        if not np.isfinite(self._sum).all():
            raise ModelOutputError(NO_FINITE_STATE)
        return (self._sum / max(float(np.linalg.norm(self._sum)), 1e-12)).astype(np.float32)

    def close(self) -> None:
        self._entry.close()

    def _states(self, batch: Batch) -> Array:
        """The normed hidden states of a chunk: [t, d]."""
        return self._runner.states(batch)
