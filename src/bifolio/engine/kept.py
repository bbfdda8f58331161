"""Conversations whose blocks an engine keeps after their end, so that others continue them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Sequences
from typing import Unpack

from bifolio.cache.block_manager import KVCacheBlockManager
from bifolio.engine.requests import RequestFactory
from bifolio.errors import RequestError
from bifolio.images import kept_images
from bifolio.sampling_params import SamplingParams
from bifolio.schedule.batcher import ContinuousBatcher
from bifolio.sequence import Request, RequestOptions


class KeptConversations(ABC):
    """The verbs of `InferenceEngine` for conversations that outlive their request."""

    blocks: KVCacheBlockManager
    batcher: ContinuousBatcher
    factory: RequestFactory
    requests: dict[str, Request]

    @abstractmethod
    def _enqueue(self, request: Request) -> Request:
        """Add a valid request to the queue."""

    def keep(self, request_id: str) -> bool:
        """Keep the conversation's blocks after its end, so that `fork` can continue it without recomputation.

        Kept conversations are dropped, the oldest first, when their blocks are needed; False if it is not running.
        """
        request = self.requests.get(request_id)
        if request is not None:
            request.keep = True
        return request is not None

    def fork(
        self,
        request_id: str,
        new_request_id: str,
        token_ids: Sequences[int],
        params: SamplingParams,
        *,
        num_kept: int | None = None,
        **options: Unpack[RequestOptions],
    ) -> Request:
        """Continue a kept conversation, or its first `num_kept` tokens, by `token_ids` and generate from there.

        The request has its salt. Raises `RequestError` if it was dropped meanwhile: send the whole conversation as a
        new request instead.
        """
        parent = self.batcher.kept(request_id)
        if parent is None:
            raise RequestError(f"no conversation is kept under {request_id!r}: send all of it as a new request")
        options["salt"] = parent.request.salt
        known = parent.token_ids if num_kept is None else parent.token_ids[:num_kept]
        options.setdefault("images", kept_images(parent.request.images, len(known)))
        request = self.factory.new_request(new_request_id, [*known, *token_ids], params, **options)
        first = request.sequences[0]
        shared = min(parent.num_computed, len(known), first.num_tokens - 1)
        if params.prompt_logprobs is not None:  # the positions that score others are computed again
            shared = min(shared, request.score_from)
        if not shared or request.cache_salt != parent.request.cache_salt:
            return self._enqueue(request)
        self.blocks.fork(parent.id, first.id)
        try:
            self.blocks.truncate(first.id, shared)
            first.num_draft_computed = min(parent.num_draft_computed, shared)
            return self._enqueue(request)
        except BaseException:
            self.blocks.release(first.id)
            raise

    def release(self, request_id: str) -> bool:
        """Drop a kept conversation."""
        return self.batcher.drop_kept(request_id)
