"""`ModelPool`: the engines of several models, within a budget of bytes.

    unloaded --request--> waiting for room --> loading --> loaded --> unloading --> unloaded
                              evicts idle models,   ^        | no request for `keep_alive`, evicted, or told to
                              least recently used   |        | evicted, and the host has room for its weights
                              first                 +- sleeping

Every engine is a process of its own, so an unloaded model leaves no bytes behind. A model is counted from before its
process starts until it has ended: the sum never exceeds the budget. Models start one after the other. With a budget
for sleep an evicted model keeps its process and its weights in host memory; the least recently used ones end when
that budget is full.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import StrEnum

from bifolio.api.client import EngineClient
from bifolio.api.messages import Control
from bifolio.errors import BifolioError, ConfigError, did_you_mean
from bifolio.serve.http.auth import App
from bifolio.serve.http.context import ServerContext
from bifolio.serve.http.errors import ApiError
from bifolio.serve.several.settings import ModelSource, SeveralModels

logger = logging.getLogger(__name__)
RETRY_SECONDS = 5
SWEEP_SECONDS = 0.5
Open = Callable[[ModelSource], AbstractAsyncContextManager[ServerContext]]


class ModelState(StrEnum):
    """The life of a model in a pool."""

    UNLOADED = "unloaded"
    WAITING = "waiting"  # for bytes of the budget
    LOADING = "loading"
    LOADED = "loaded"
    SLEEPING = "sleeping"
    UNLOADING = "unloading"


@dataclass(slots=True, eq=False)
class Entry:
    """One model of a pool."""

    source: ModelSource
    state: ModelState = ModelState.UNLOADED
    num_open: int = 0  # requests that run or wait for it
    num_running: int = 0
    num_starts: int = 0
    failed_start: int = 0  # number of the last start that failed
    last_used: float = 0.0  # of the monotonic clock
    keep_alive: float | None = None  # seconds; set by requests
    context: ServerContext | None = None
    app: App | None = None
    unload: asyncio.Event = field(default_factory=asyncio.Event)
    rests: bool = False  # it is evicted for others, and sleeps if it can
    is_asleep: bool = False  # also while it waits for room to wake
    has_slept: bool = False  # its engine keeps the copy of its weights when it wakes
    wanted: asyncio.Event = field(default_factory=asyncio.Event)  # by a request while it sleeps
    problem: str | None = None  # of the start that failed

    @property
    def is_counted(self) -> bool:
        """Whether the model takes bytes of the budget."""
        return self.is_asleep or self.state in (ModelState.LOADING, ModelState.LOADED, ModelState.UNLOADING)

    @property
    def num_bytes(self) -> int:
        """Bytes of the budget that it takes now."""
        if self.is_asleep:
            return self.source.asleep_bytes
        return self.source.num_bytes if self.is_counted else 0

    @property
    def expires_in(self) -> float | None:
        """Seconds until an idle model is unloaded."""
        if self.keep_alive is None or self.state is not ModelState.LOADED or self.num_open:
            return None
        return max(self.last_used + self.keep_alive - time.monotonic(), 0.0)


class ModelPool:
    """Starts and ends engines; `use` is the way to one. All methods run on the event loop."""

    def __init__(self, settings: SeveralModels, open_model: Open, make_app: Callable[[ServerContext], App]) -> None:
        self.settings = settings
        self.entries = {source.name: Entry(source) for source in settings.sources}
        self.draining = False
        self.name = ", ".join(self.entries)
        self.num_evictions = 0
        self._open, self._make_app = open_model, make_app
        self._changed = asyncio.Condition()
        self._turn = asyncio.Lock()  # of the model that starts
        self._lives: set[asyncio.Task[None]] = set()
        self._sweeper: asyncio.Task[None] | None = None

    # -- queries -------------------------------------------------------------------------------------------------------

    @property
    def engine(self) -> ModelPool:
        """All engines together, for a server that drains."""
        return self

    @property
    def num_bytes(self) -> int:
        """Bytes of all models that are loaded, start or end, and the rest of those that sleep."""
        return sum(entry.num_bytes for entry in self.entries.values())

    @property
    def num_host_bytes(self) -> int:
        """Bytes of weights in host memory: of models that sleep, or have slept and are awake."""
        return sum(entry.source.host_bytes for entry in self.entries.values() if entry.has_slept)

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return sum(entry.context.engine.num_open for entry in self.entries.values() if entry.context is not None)

    def find(self, name: str) -> Entry:
        """A model by its name; ollama's clients add `:latest`."""
        entry = self.entries.get(name) or self.entries.get(name.removesuffix(":latest"))
        if entry is None:
            hint = did_you_mean(name, self.entries) or f": this server has {', '.join(self.entries)}"
            raise ApiError(404, f"the model {name!r} does not exist{hint}", "model_not_found", param="model")
        return entry

    # -- requests ------------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def use(self, entry: Entry) -> AsyncIterator[App]:
        """The application of a model, which stays loaded meanwhile. A request waits a limited time for its start."""
        entry.num_open += 1
        try:
            app = await self._ready(entry)
            entry.num_running += 1
            try:
                yield app
            finally:
                entry.num_running -= 1
        finally:
            entry.num_open -= 1
            entry.last_used = time.monotonic()
            await self._notify()

    async def _ready(self, entry: Entry) -> App:
        deadline = time.monotonic() + self.settings.wait_seconds
        watched = 0  # the start that this request waits for
        while True:
            if self.draining:
                raise ApiError(503, "the server is shutting down: ask another one", "shutting_down", retry_after=5)
            if entry.state is ModelState.LOADED and entry.app is not None and not entry.unload.is_set():
                return entry.app
            if watched and entry.failed_start == watched:
                raise ApiError(503, entry.problem or "", "model_not_started", retry_after=RETRY_SECONDS)
            if entry.state is ModelState.UNLOADED:
                self._start(entry)
            elif entry.state is ModelState.SLEEPING and not entry.unload.is_set():
                entry.state = ModelState.WAITING
                entry.num_starts += 1
                entry.wanted.set()
                await self._notify()
            watched = entry.num_starts
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._late(entry)
            await self._wait_changed(min(left, SWEEP_SECONDS))

    def _late(self, entry: Entry) -> ApiError:
        name, seconds = entry.source.name, math.ceil(self.settings.wait_seconds)
        reason = "waits for other models to become idle" if entry.state is ModelState.WAITING else "is being loaded"
        message = f"the model {name!r} {reason} for more than {seconds} s: ask again, or raise --models-memory"
        return ApiError(503, message, "model_loading", retry_after=RETRY_SECONDS)

    async def _wait_changed(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(seconds, 0.0)), self._changed:
                await self._changed.wait()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def load(self, entry: Entry) -> None:
        """Load a model ahead of requests."""
        async with self.use(entry):
            return

    async def unload(self, entry: Entry) -> None:
        """End a model's engine; its requests get a moment to finish first."""
        if entry.state in (ModelState.LOADED, ModelState.SLEEPING):
            entry.rests = False
            entry.unload.set()
            while entry.unload.is_set():
                await self._wait_changed(1.0)

    # -- the life of an engine -----------------------------------------------------------------------------------------

    def _start(self, entry: Entry) -> None:
        entry.state = ModelState.WAITING
        entry.num_starts += 1
        entry.unload.clear()
        entry.wanted.clear()
        life = asyncio.create_task(self._live(entry))
        self._lives.add(life)
        life.add_done_callback(self._lives.discard)

    async def _live(self, entry: Entry) -> None:
        """Wait for room, start the engine, let it sleep and wake, and end it when it is told to."""
        name = entry.source.name
        try:
            async with contextlib.AsyncExitStack() as stack:
                async with self._turn:
                    if not await self._make_room(entry):
                        return
                    entry.state = ModelState.LOADING
                    await self._notify()
                    entry.context = await stack.enter_async_context(self._open(entry.source))
                entry.app = self._make_app(entry.context)
                entry.keep_alive = self.settings.keep_alive
                logger.info("model loaded", extra={"model": name})
                while True:
                    entry.state, entry.last_used, entry.problem = ModelState.LOADED, time.monotonic(), None
                    await self._notify()
                    await entry.unload.wait()
                    while entry.num_running and not self.draining:
                        await self._wait_changed(SWEEP_SECONDS)
                    entry.state = ModelState.UNLOADING
                    if not await self._sleep_until_wanted(entry, entry.context.engine):
                        break
            logger.info("model unloaded", extra={"model": name})
        except (BifolioError, OSError, ApiError) as error:
            entry.problem, entry.failed_start = f"the model {name!r} cannot be started: {error}", entry.num_starts
            logger.error("%s", entry.problem)
        finally:
            entry.context = entry.app = None
            entry.state, entry.is_asleep, entry.has_slept = ModelState.UNLOADED, False, False
            entry.unload.clear()
            await self._notify()

    async def _sleep_until_wanted(self, entry: Entry, engine: EngineClient) -> bool:
        """Let an evicted model sleep until a request wants it and there is room; False: it is to end."""
        if not entry.rests or self.draining or not await self._make_host_room(entry):
            return False
        entry.has_slept = True
        await engine.control(Control("", "sleep", level=1))
        if not entry.rests:  # it was told to end meanwhile
            return False
        entry.rests, entry.is_asleep = False, True
        entry.unload.clear()
        while True:
            entry.state = ModelState.SLEEPING
            entry.wanted.clear()
            logger.info("model sleeps", extra={"model": entry.source.name})
            await self._notify()
            while not (entry.wanted.is_set() or entry.unload.is_set()):
                await self._wait_changed(SWEEP_SECONDS)
            if entry.unload.is_set():
                return False
            async with self._turn:
                if self.draining:
                    return False
                if not await self._make_room(entry):
                    continue
                entry.state, entry.is_asleep = ModelState.LOADING, False
                await self._notify()
                await engine.control(Control("", "wake"))
                return True

    async def _make_host_room(self, entry: Entry) -> bool:
        """End models that sleep until the weights of this one fit into host memory; False: they never will."""
        own = 0 if entry.has_slept else entry.source.host_bytes
        while self.num_host_bytes + own > self.settings.sleep_bytes:
            if not self._end_sleeper():
                return False
            await self._wait_changed(1.0)
        return self.settings.sleep_bytes > 0

    def _end_sleeper(self) -> bool:
        """End the least recently used model that sleeps, unless one ends already; False if there is none."""
        asleep = [one for one in self.entries.values() if one.state is ModelState.SLEEPING]
        if asleep and not any(one.unload.is_set() for one in asleep):
            min(asleep, key=lambda one: one.last_used).unload.set()
        return bool(asleep)

    async def _make_room(self, entry: Entry) -> bool:
        """Evict idle models until this one fits; False when no request waits for it any more."""
        while self.num_bytes - entry.num_bytes + entry.source.num_bytes > self.settings.max_bytes:
            if not entry.num_open or self.draining:
                return False
            victim = self._least_recent()
            if victim is not None:
                victim.rests = victim.state is ModelState.LOADED
                victim.unload.set()
                self.num_evictions += 1
                logger.info("model evicted", extra={"model": victim.source.name, "for_model": entry.source.name})
            await self._wait_changed(1.0)
        return True

    def _least_recent(self) -> Entry | None:
        """The idle model that was not used for the longest time; None while one ends already, or none is idle.

        Loaded models are evicted before those that sleep.
        """
        if any(one.unload.is_set() for one in self.entries.values()):
            return None
        for state in (ModelState.LOADED, ModelState.SLEEPING):
            idle = [
                one
                for one in self.entries.values()
                if one.state is state and not one.num_open and one.source.name not in self.settings.keep
            ]
            if idle:
                return min(idle, key=lambda one: one.last_used)
        return None

    # -- the server's life ---------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Load the models that are always kept; ConfigError: one of them cannot be started."""
        self._sweeper = asyncio.create_task(self._sweep())
        for entry in self.entries.values():
            if entry.source.name in self.settings.keep:
                try:
                    await self.load(entry)
                except ApiError as error:
                    raise ConfigError(str(error)) from error

    async def _sweep(self) -> None:
        """Unload models that were not used for the time that they are kept."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            for entry in self.entries.values():
                if (
                    entry.expires_in == 0.0
                    and not entry.unload.is_set()
                    and entry.source.name not in self.settings.keep
                ):
                    entry.rests = False
                    entry.unload.set()

    def begin_drain(self) -> None:
        self.draining = True
        for entry in self.entries.values():
            if entry.context is not None:
                entry.context.begin_drain()

    def fail_all(self, error: Exception) -> None:
        """End every request that is in flight with this error."""
        for entry in self.entries.values():
            if entry.context is not None:
                entry.context.engine.fail_all(error)

    async def close(self) -> None:
        """End all engines."""
        self.draining = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        for entry in self.entries.values():
            entry.unload.set()
        await self._notify()
        if self._lives:
            await asyncio.wait(self._lives)
