"""A fleet of simulated engines behind the real router, replaying a trace.

    arrival ── network ──▶ replica (router) ── steps ──▶ first token, last token
    arrival ── network ──▶ prefill replica ── K/V over the network ──▶ decode replica      with a ratio P:D

Time is simulated: an event queue, no sleeping. The queue, the slots, the planner, the block manager and the router are
those of the product (`measure.fleet_replica`, `cluster.prefix_router`); durations of steps come from a measured engine
(`measure.step_times`), those of the network are parameters.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.fleet.replica import VOCABULARY, ReplicaSizes, SimulatedReplica, tell
from benchmarks.fleet.step_times import H200_8B, H200_8B_BYTES_PER_TOKEN, StepTimes
from bifolio.cluster.prefix_router import POLICIES, PrefixRouter, prefix_hashes
from bifolio.errors import ConfigError
from bifolio.measure.statistics import Distribution
from bifolio.measure.trace_files import TraceRequest, make_prompts, scaled

ONE_CACHE = "one cache"  # a single engine with the memory and the speed of all


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """Everything but the trace."""

    num_replicas: int = 4
    policy: str = "prefix"  # of `POLICIES`, or `ONE_CACHE`
    num_prefill: int = 0  # replicas that only prefill; 0: all do both
    sizes: ReplicaSizes = field(default_factory=ReplicaSizes)
    times: StepTimes = H200_8B
    bytes_per_token: int = H200_8B_BYTES_PER_TOKEN
    network_seconds: float = 0.001  # of a message
    event_seconds: float = 0.02  # until the router knows of a block
    bandwidth: float = 12.5e9  # bytes per second between prefill and decode replicas
    miss_weight: float | None = None  # of the router; None: its default
    first_token_limit: float = 5.0  # seconds; a request within both limits counts as good
    per_token_limit: float = 0.05

    @property
    def name(self) -> str:
        split = f", {self.num_prefill}:{self.num_replicas - self.num_prefill}" if self.num_prefill else ""
        return f"{self.num_replicas} × {self.policy}{split}"


@dataclass(slots=True)
class Flight:
    """One request on its way."""

    prompt: list[int]
    hashes: list[int]
    num_output: int  # simulated tokens
    arrival: float
    first: float = 0.0
    end: float = 0.0


@dataclass(slots=True)
class FleetReport:
    """The outcome of one simulated run."""

    name: str
    num_replicas: int
    num_requests: int
    seconds: float  # from the first arrival to the last token
    hit_rate: float  # prompt tokens found in a cache
    goodput: float  # requests per second within both limits
    good_share: float
    first_token: Distribution
    per_token: Distribution
    num_preemptions: int
    use: float  # share of the time in which the replicas computed
    first_tokens: list[float] = field(repr=False, default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "num_replicas": self.num_replicas,
            "num_requests": self.num_requests,
            "seconds": self.seconds,
            "hit_rate": self.hit_rate,
            "goodput": self.goodput,
            "good_share": self.good_share,
            "time_to_first_token": self.first_token.as_dict(),
            "time_per_output_token": self.per_token.as_dict(),
            "num_preemptions": self.num_preemptions,
            "use": self.use,
        }


class Fleet:
    """Runs one simulation."""

    def __init__(self, settings: FleetSettings, requests: Sequence[TraceRequest], speed: float = 1.0) -> None:
        self.settings = settings
        sizes = settings.sizes
        if settings.policy != ONE_CACHE and settings.policy not in POLICIES:
            raise ConfigError(f"{settings.policy!r} is no policy: choose from {', '.join([*POLICIES, ONE_CACHE])}")
        if not 0 <= settings.num_prefill < max(settings.num_replicas, 1):
            raise ConfigError("a fleet needs at least one decode replica beside its prefill replicas")
        self._grain = sizes.grain
        longest = sizes.cache_tokens // sizes.grain // 2
        short, self.num_cut = scaled(requests, 1 / sizes.grain, longest)
        block = sizes.block_size // sizes.grain
        self.flights = [
            Flight(prompt, prefix_hashes(prompt, b"", block), one.num_output, one.arrival / speed)
            for one, prompt in zip(short, make_prompts(short, VOCABULARY), strict=True)
        ]
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()
        self._num_ended = 0
        self._build()

    def _build(self) -> None:
        settings = self.settings
        if settings.policy == ONE_CACHE:
            count, sizes = settings.num_replicas, settings.sizes
            big = replace(sizes, cache_tokens=sizes.cache_tokens * count, max_num_seqs=sizes.max_num_seqs * count,
                          chunk_size=sizes.chunk_size * count)  # fmt: skip
            replicas = [SimulatedReplica("all", big, settings.times, speed=count)]
        else:
            names = [f"{number:04}" for number in range(settings.num_replicas)]
            replicas = [SimulatedReplica(name, settings.sizes, settings.times) for name in names]
        first = replicas[: settings.num_prefill] or replicas
        self.replicas = {replica.name: replica for replica in replicas}
        self.router = self._new_router([replica.name for replica in first])
        rest = replicas[settings.num_prefill :] if settings.num_prefill else []
        self.decode_router = self._new_router([replica.name for replica in rest]) if rest else None
        self._router_of = dict.fromkeys((replica.name for replica in first), self.router)
        self._router_of |= dict.fromkeys((replica.name for replica in rest), self.decode_router or self.router)

    def _new_router(self, names: list[str]) -> PrefixRouter:
        kind = POLICIES.get(self.settings.policy, PrefixRouter)
        router = kind()
        router.block_size = self.settings.sizes.block_size
        if self.settings.miss_weight is not None:
            router.miss_weight = self.settings.miss_weight
        router.set_replicas(names)
        return router

    # -- events --------------------------------------------------------------------------------------------------------
    def run(self, on_progress: Callable[[int], None] | None = None) -> FleetReport:
        for number, flight in enumerate(self.flights):
            self._at(flight.arrival, lambda now, number=number: self._arrive(now, number))  # type: ignore[misc]
        while self._events:
            now, _, action = heapq.heappop(self._events)
            action(now)
            if on_progress is not None:
                on_progress(self._num_ended)
        return self._report()

    def _at(self, moment: float, action: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (moment, next(self._order), action))

    def _arrive(self, now: float, number: int) -> None:
        flight = self.flights[number]
        name = self.router.rank(flight.hashes)[0].replica
        self.router.begin(str(number), name, flight.hashes)
        only_first = self.decode_router is not None
        count = 1 if only_first else flight.num_output
        self._at(now + self.settings.network_seconds, lambda later: self._deliver(later, name, number, count))

    def _deliver(self, now: float, name: str, number: int, num_output: int, received: bool = False) -> None:
        replica = self.replicas[name]
        replica.add(number, self.flights[number].prompt, num_output, received=received)
        if not replica.is_busy:
            self._start_step(now, replica)

    def _start_step(self, now: float, replica: SimulatedReplica) -> None:
        replica.is_busy = True
        outcome = replica.step()
        self._at(now + outcome.seconds, lambda later: self._end_step(later, replica, outcome.first, outcome.ended))

    def _end_step(self, now: float, replica: SimulatedReplica, first: list[int], ended: list[int]) -> None:
        router = self._router_of[replica.name]
        self._at(now + self.settings.event_seconds, lambda later: tell(router, replica))
        is_prefill = self.decode_router is not None and router is self.router
        for number in first:
            router.first_output(str(number))
            if not self.flights[number].first:
                self.flights[number].first = now + self.settings.network_seconds
        for number in ended:
            router.end(str(number))
            if is_prefill and self.flights[number].num_output > 1:
                self._send_on(now, number)
            else:
                self.flights[number].end = now + self.settings.network_seconds
                self._num_ended += 1
        if replica.has_work:
            self._start_step(now, replica)
        else:
            replica.is_busy = False

    def _send_on(self, now: float, number: int) -> None:
        """Send keys and values from a prefill replica to a decode replica; blocks that are there are not sent."""
        flight, router, settings = self.flights[number], self.decode_router, self.settings
        if router is None:
            return
        choice = router.rank(flight.hashes)[0]
        router.begin(str(number), choice.replica, flight.hashes)
        known = choice.num_matched * settings.sizes.block_size
        size = max(len(flight.prompt) * self._grain - known, 0) * settings.bytes_per_token
        arrival = now + settings.network_seconds + size / settings.bandwidth
        rest = flight.num_output - 1
        self._at(arrival, lambda later: self._deliver(later, choice.replica, number, rest, received=True))

    # -- the report ----------------------------------------------------------------------------------------------------
    def _report(self) -> FleetReport:
        settings, flights = self.settings, self.flights
        waits = [flight.first - flight.arrival for flight in flights]
        paces = [
            (flight.end - flight.first) / ((flight.num_output - 1) * self._grain)
            for flight in flights
            if flight.num_output > 1
        ]
        good = sum(
            wait <= settings.first_token_limit
            and (flight.end - flight.first)
            <= settings.per_token_limit * self._grain * max(flight.num_output - 1, 0) + 1e-9
            for wait, flight in zip(waits, flights, strict=True)
        )
        seconds = max(flight.end for flight in flights)
        first = [replica for replica in self.replicas.values() if self._router_of.get(replica.name) is self.router]
        prompt = sum(replica.batcher.num_prompt_tokens for replica in first)
        cached = sum(replica.batcher.num_cached_tokens for replica in first)
        return FleetReport(
            settings.name,
            settings.num_replicas,
            len(flights),
            seconds,
            cached / max(prompt, 1),
            good / seconds,
            good / len(flights),
            Distribution.of(waits),
            Distribution.of(paces),
            sum(replica.num_preemptions for replica in self.replicas.values()),
            sum(replica.busy_seconds for replica in self.replicas.values()) / (seconds * len(self.replicas)),
            waits,
        )
