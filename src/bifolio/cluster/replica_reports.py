"""Counters of the replicas of a deployment, collected every second; a replica that stays silent is ranked last."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import msgspec

from bifolio.api import messages as m
from bifolio.cluster.prefix_router import PrefixRouter
from bifolio.errors import EngineFaultError
from bifolio.serve.process.engine_connection import COUNTERS, lost

REPORT_SECONDS = 1.0  # between two reports of the replicas' counters
REPORT_TIMEOUT = 5.0
SILENT_SECONDS = 10.0  # without a report: the requests of the replica are lost
_decoder = msgspec.msgpack.Decoder(m.FromEngine)


async def answer_of(response: Any) -> Any:
    """The message that a replica answers with; its refusal, or its loss, is raised as EngineFaultError."""
    try:
        answer = _decoder.decode(await response)
    except asyncio.CancelledError:
        response.cancel()
        raise
    except Exception as error:
        raise lost("the replica that ran the request was lost: ask again") from error
    if isinstance(answer, m.Refused):
        raise EngineFaultError(answer.kind, answer.message)
    return answer


class ReplicaReports:
    """The newest counters of each replica."""

    def __init__(
        self, handle: Any, router: PrefixRouter, on_silent: Callable[[str], None] = lambda replica: None
    ) -> None:
        self._handle = handle  # of the deployment of `EngineReplica`
        self._router = router
        self._on_silent = on_silent  # called with the name of a replica
        self._reports: dict[str, dict[str, float]] = {}  # replica -> its counters
        self._base: dict[str, float] = {}  # counters of replicas that are gone
        self._heard: dict[str, float] = {}  # replica -> when its last report came
        self.num_gone = 0  # replicas

    def __len__(self) -> int:
        return len(self._reports)

    @property
    def stats(self) -> dict[str, float]:
        """The sums over all replicas."""
        sums: dict[str, float] = {}
        for report in self._reports.values():
            for name, value in report.items():
                sums[name] = sums.get(name, 0.0) + value
        if self._reports and "utilisation" in sums:
            sums["utilisation"] /= len(self._reports)
        return sums

    def counter(self, name: str) -> float:
        return self._base.get(name, 0.0) + sum(report.get(name, 0.0) for report in self._reports.values())

    def loads(self) -> dict[str, int]:
        """Requests in flight on each replica, those of other front ends included."""
        return {
            replica: int(report.get("num_running", 0.0) + report.get("num_waiting", 0.0))
            for replica, report in self._reports.items()
        }

    async def run(self) -> None:
        """Collect reports until the task is cancelled."""
        while True:
            names = self._router.replicas
            for gone in [name for name in self._reports if name not in names]:
                self.num_gone += 1
                self._heard.pop(gone, None)
                for name, value in self._reports.pop(gone).items():
                    if name in COUNTERS:
                        self._base[name] = self._base.get(name, 0.0) + value
            await asyncio.gather(*(self._collect(name) for name in names))
            await asyncio.sleep(REPORT_SECONDS + len(names) / 100)

    async def _collect(self, replica: str) -> None:
        """Ask a replica for its counters; one that stays silent loses its requests before Ray notices."""
        now = asyncio.get_running_loop().time
        heard = self._heard.setdefault(replica, now())
        with contextlib.suppress(Exception):  # the replica is gone or busy: its last report stays
            async with asyncio.timeout(REPORT_TIMEOUT):
                beat = await answer_of(self._handle.report.remote("", b"", replica))
            if isinstance(beat, m.Beat) and replica in self._router.replicas:
                self._reports[replica] = beat.stats
                self._heard[replica] = heard = now()
        is_silent = now() - heard > SILENT_SECONDS
        self._router.set_silent(replica, is_silent)
        if is_silent:
            self._on_silent(replica)
