"""`PrefillPool`: the prefill engines of an application with separate phases, as a front end chooses among them.

    front end ── request, SECRET@HOST:PORT ──▶ decode replica ── pull(prompt) ──▶ prefill replica
                                                     ◀───────── blocks ──────────┘

The front end names the prefill replica that has most of the prompt cached and little work; the decode replica fetches
the blocks from there (`engine.transfer`). A prefill replica that is lost or silent is not chosen, and a transfer that
fails costs the decode replica a computation.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

from bifolio.api import messages as m
from bifolio.cluster.prefix_router import PrefixRouter
from bifolio.cluster.replica_reports import ReplicaReports, answer_of
from bifolio.errors import EngineFaultError

RETRY_SECONDS = 0.1  # until the first replica is known


class PrefillPool:
    """The replicas of one deployment with the role `prefill`."""

    def __init__(self, handle: Any, router: PrefixRouter, threshold: int) -> None:
        self._handle = handle
        self._router = router
        self._threshold = threshold  # tokens of the shortest prompt that is computed here
        self.reports = ReplicaReports(handle, router)
        self._reporter: asyncio.Task[None] | None = None

    def start(self, block_size: int) -> None:
        """Follow the replicas from now on; until one is ready, decode replicas compute all prompts."""
        self._router.block_size = block_size
        self._reporter = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        while not self._router.replicas:  # Ray names the replicas to a handle that was used
            with contextlib.suppress(EngineFaultError):
                await answer_of(self._handle.describe.remote("", b"", ""))
            await asyncio.sleep(RETRY_SECONDS)
        await self.reports.run()

    async def close(self) -> None:
        if self._reporter is not None:
            self._reporter.cancel()
            await asyncio.gather(self._reporter, return_exceptions=True)

    def choose(self, request: m.Start, hashes: Sequence[int]) -> str:
        """The `BlockSource` of the prompt; empty: the decode replica computes it. `end` follows in any case.

        Prompts with logprobs stay, since they need all logits.
        """
        if len(request.prompt_token_ids) < self._threshold or request.params.get("prompt_logprobs") is not None:
            return ""
        for choice in self._router.rank(hashes, self.reports.loads()):
            source = self._router.block_source(choice.replica)
            if source:
                self._router.begin(request.id, choice.replica, hashes)
                return source
        return ""

    def end(self, request_id: str) -> None:
        """Record that a prompt is computed, or that its request is over."""
        self._router.end(request_id)
