"""Several models under a budget of bytes: random traffic on stand-ins for engines, and the arithmetic of the limits."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from bifolio.api.messages import Control
from bifolio.cli.options import BatchEngine
from bifolio.cli.serve import ServerOptions
from bifolio.cli.serve_several import SeveralOptions
from bifolio.errors import ConfigError, EngineFaultError, FaultKind
from bifolio.serve.http.errors import ApiError
from bifolio.serve.several import pool as pools
from bifolio.serve.several.application import seconds_of
from bifolio.serve.several.pool import ModelPool, ModelState
from bifolio.serve.several.settings import PROCESS_BYTES, ModelSource, SeveralModels, find_models
from helpers import tiny_folder


class StandIn:
    """A context whose engine starts and ends in no time."""

    def __init__(self, machine: Machine, source: ModelSource) -> None:
        self.name, self.engine, self.num_open = source.name, self, 0
        self.machine, self.source, self.is_asleep, self.has_slept = machine, source, False, False

    async def control(self, control: Control) -> None:
        """Sleep or wake, as the engine's process does."""
        self.is_asleep = control.verb == "sleep"
        given_back = self.source.num_bytes - self.source.asleep_bytes
        if self.is_asleep:
            await asyncio.sleep(self.machine.seconds)
        self.machine.take(-given_back if self.is_asleep else given_back)
        self.machine.asleep += 0 if self.has_slept else self.source.host_bytes  # the copy is kept
        self.has_slept = True
        self.machine.most_asleep = max(self.machine.most_asleep, self.machine.asleep)

    def begin_drain(self) -> None: ...

    def fail_all(self, error: Exception) -> None: ...


class Machine:
    """Counts the bytes of engines that exist."""

    def __init__(self, sizes: dict[str, int], budget: int, seconds: float = 0.0, **options: Any) -> None:
        stays = 1 if "sleep_bytes" in options else 0
        sources = tuple(
            ModelSource(name, name, size, asleep_bytes=stays, host_bytes=size - stays) for name, size in sizes.items()
        )
        self.settings = SeveralModels(sources, budget, 0, **options)
        self.held = self.most = self.num_starts = self.asleep = self.most_asleep = 0
        self.broken: set[str] = set()
        self.seconds = seconds
        self.pool = ModelPool(self.settings, self.opened, lambda context: context)  # type: ignore[arg-type]

    @contextlib.asynccontextmanager
    async def opened(self, source: ModelSource) -> AsyncIterator[Any]:
        self.num_starts += 1
        if source.name in self.broken:
            raise ConfigError("the file is gone")
        self.take(source.num_bytes)
        await asyncio.sleep(self.seconds)
        engine = StandIn(self, source)
        try:
            yield engine
        finally:
            await asyncio.sleep(self.seconds)
            self.held -= source.asleep_bytes if engine.is_asleep else source.num_bytes
            self.asleep -= source.host_bytes if engine.has_slept else 0

    def take(self, num_bytes: int) -> None:
        self.held += num_bytes
        self.most = max(self.most, self.held)

    async def ask(self, name: str, seconds: float = 0.0) -> str:
        async with self.pool.use(self.pool.find(name)) as app:
            assert not app.is_asleep  # type: ignore[attr-defined]
            await asyncio.sleep(seconds)
            return str(app.name)  # type: ignore[attr-defined]


@pytest.mark.full
@pytest.mark.parametrize("sleep", [{}, {"sleep_bytes": 25}, {"sleep_bytes": 1000}], ids=["end", "some", "all"])
@pytest.mark.parametrize("seed", range(4))
def test_random_traffic_stays_within_the_budget(
    seed: int, sleep: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty models under a budget for three: every request is answered by its model, and nothing is left."""
    monkeypatch.setattr(pools, "SWEEP_SECONDS", 0.01)
    generator = random.Random(seed)

    async def run() -> Machine:
        sizes = {f"m{number}": generator.randint(5, 10) for number in range(20)}
        machine = Machine(sizes, 30, 0.002, keep=frozenset({"m3"} if seed % 2 else ()), **sleep)
        await machine.pool.open()

        async def client() -> None:
            for _ in range(15):
                name = f"m{generator.randrange(20)}"
                if generator.random() < 0.1:
                    await machine.pool.unload(machine.pool.find(name))
                assert await machine.ask(name, generator.random() * 0.01) == name
                assert machine.pool.num_bytes <= 30

        await asyncio.gather(*(client() for _ in range(6)))
        if seed % 2:
            assert machine.pool.find("m3").state is ModelState.LOADED
        await machine.pool.close()
        return machine

    machine = asyncio.run(run())
    assert machine.held == machine.asleep == machine.pool.num_bytes == 0
    assert machine.most_asleep <= sleep.get("sleep_bytes", 0)
    assert (machine.most_asleep > 0) == bool(sleep)
    assert 20 <= machine.most <= 30
    assert not any(entry.num_open or entry.num_running for entry in machine.pool.entries.values())


def test_the_least_recently_used_idle_model_is_evicted() -> None:
    async def run() -> None:
        machine = Machine({"a": 10, "b": 10, "c": 10}, 20)
        for name in ("a", "b", "a", "c"):
            await machine.ask(name)
        states = {name: entry.state for name, entry in machine.pool.entries.items()}
        assert states == {"a": ModelState.LOADED, "b": ModelState.UNLOADED, "c": ModelState.LOADED}
        assert machine.pool.num_evictions == 1
        await machine.pool.close()

    asyncio.run(run())


def test_an_evicted_model_sleeps_and_wakes_without_another_start() -> None:
    async def run() -> None:
        machine = Machine({"a": 10, "b": 10, "c": 10}, 12, sleep_bytes=18)
        for name in ("a", "b", "a", "b"):
            await machine.ask(name)
        states = {name: entry.state for name, entry in machine.pool.entries.items()}
        assert states == {"a": ModelState.SLEEPING, "b": ModelState.LOADED, "c": ModelState.UNLOADED}
        assert machine.num_starts == 2
        assert machine.pool.num_bytes == machine.held == 11
        assert machine.asleep == 18
        await machine.ask("c")
        await machine.ask("b")  # the host had no room for a third: "a" ended, and "b" wakes
        states = {name: entry.state for name, entry in machine.pool.entries.items()}
        assert states == {"a": ModelState.UNLOADED, "b": ModelState.LOADED, "c": ModelState.SLEEPING}
        await machine.pool.unload(machine.pool.find("c"))
        assert machine.pool.find("c").state is ModelState.UNLOADED
        await machine.pool.unload(machine.pool.find("b"))
        assert machine.asleep == 0
        assert machine.most <= 12
        await machine.pool.close()

    asyncio.run(run())


def test_a_model_that_does_not_wake_is_started_again() -> None:
    async def run() -> None:
        machine = Machine({"a": 10, "b": 10}, 12, sleep_bytes=100)
        await machine.ask("a")
        context = machine.pool.find("a").context
        await machine.ask("b")

        async def lost(control: Control) -> None:
            raise EngineFaultError(FaultKind.LOST, "the engine has gone")

        context.control = lost  # type: ignore[union-attr, attr-defined]
        with pytest.raises(ApiError, match="the engine has gone"):
            await machine.ask("a")
        assert await machine.ask("a") == "a"
        assert machine.num_starts == 3
        await machine.pool.close()

    asyncio.run(run())


def test_a_request_waits_for_room_and_is_told_when_it_takes_too_long() -> None:
    async def run() -> None:
        machine = Machine({"a": 10, "b": 10}, 10, wait_seconds=0.2)
        busy = asyncio.create_task(machine.ask("a", 0.6))
        await asyncio.sleep(0.05)
        with pytest.raises(ApiError, match=r"'b' waits for other models to become idle for more than 1 s") as caught:
            await machine.ask("b")
        assert caught.value.status == 503
        assert await busy == "a"
        assert await machine.ask("b") == "b"
        await machine.pool.close()

    asyncio.run(run())


def test_a_model_that_cannot_start_refuses_its_requests_and_is_tried_again() -> None:
    async def run() -> None:
        machine = Machine({"a": 10, "b": 10}, 20)
        machine.broken.add("a")
        for _ in range(2):
            with pytest.raises(ApiError, match="'a' cannot be started: the file is gone"):
                await machine.ask("a")
        assert machine.num_starts == 2
        assert await machine.ask("b") == "b"
        machine.broken.clear()
        assert await machine.ask("a") == "a"
        assert machine.pool.find("a").problem is None
        with pytest.raises(ApiError, match="this server has a, b"):
            machine.pool.find("nobody-knows-it")
        assert machine.pool.find("a:latest").source.name == "a"
        await machine.pool.close()

    asyncio.run(run())


def test_a_model_is_unloaded_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "SWEEP_SECONDS", 0.01)

    async def run() -> None:
        machine = Machine({"a": 10, "b": 10}, 20, keep_alive=0.1, keep=frozenset({"b"}))
        await machine.pool.open()
        await machine.ask("a")
        assert machine.pool.find("a").state is ModelState.LOADED
        await asyncio.sleep(0.4)
        assert machine.pool.find("a").state is ModelState.UNLOADED
        assert machine.pool.find("b").state is ModelState.LOADED
        await machine.pool.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("value", "seconds"), [(30, 30.0), ("5m", 300.0), ("1.5h", 5400.0), ("250ms", 0.25), (-1, None), ("-1s", None)]
)
def test_times_are_written_as_ollama_writes_them(value: Any, seconds: float | None) -> None:
    assert seconds_of(value) == seconds


@pytest.mark.parametrize("value", ["soon", "", [], "5 weeks", True])
def test_times_that_mean_nothing_are_refused(value: Any) -> None:
    with pytest.raises(ApiError, match="keep_alive is a number of seconds"):
        seconds_of(value)


def test_bytes_and_names_of_models(tmp_path: Path) -> None:
    folder = tiny_folder()
    models = tmp_path / "models"
    models.mkdir()
    (models / "one").symlink_to(folder)
    (models / "two").symlink_to(folder)
    (models / "notes.txt").write_text("no model")
    (models / "broken.gguf").write_bytes(b"GGUF")
    found = find_models([], models, 1000)
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert [(source.name, source.num_bytes) for source in found] == [
        (name, weights + 1000 + PROCESS_BYTES) for name in ("one", "two")
    ]
    with pytest.raises(ConfigError, match="are both called 'one'"):
        find_models([str(models / "one")], models, 1000)
    with pytest.raises(ConfigError, match=r"holds no \.gguf file"):
        find_models([], tmp_path, 1000)


def test_options_of_several_models(tmp_path: Path) -> None:
    names = [str(tiny_folder()), str(tiny_folder(seed=1))]
    engine = BatchEngine(memory="1MB")
    found = SeveralOptions(models_memory="2GB", keep_alive="5m").settings(names, ServerOptions(), engine)
    assert found is not None
    assert (found.max_bytes, found.cache_bytes, found.keep_alive) == (2 * 10**9, 10**6, 300.0)
    assert SeveralOptions().settings(names[:1], ServerOptions(), engine) is None
    for options, server, sentence in (
        ({"models_memory": "1MB"}, {}, "raise it, or pass a smaller --memory"),
        ({"keep": ["nobody"]}, {}, "--keep 'nobody' names no model"),
        ({}, {"name": "x"}, "--served-model-name cannot be combined with several models"),
        ({"models_dir": tmp_path / "none"}, {}, "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            SeveralOptions(**options).settings(names, ServerOptions(**server), engine)
    with pytest.raises(ConfigError, match="--keep-alive is for several models"):
        SeveralOptions(keep_alive="5m").settings(names[:1], ServerOptions(), engine)
