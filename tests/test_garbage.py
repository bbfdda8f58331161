"""The collector of an engine process: ended requests leave memory without the collector's own rule."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from bifolio import SamplingParams
from bifolio.garbage import QuietCollector, no_garbage_collection
from helpers import drain, make_engine, random_prompt


@pytest.fixture(autouse=True)
def own_collector() -> Iterator[None]:
    """The collector does not run by itself here; objects that were frozen are looked at again afterwards."""
    thresholds = gc.get_threshold()
    gc.set_threshold(0)
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()


def ended_request() -> weakref.ref[Any]:
    """A part of a request that has ended."""

    def unchanged(output: list[int], logits: Any) -> Any:
        return logits

    engine = make_engine()
    engine.add_request("a", random_prompt(6, 1, 61), SamplingParams(max_tokens=3, logits_processors=[unchanged]))
    drain(engine)
    return weakref.ref(unchanged)


@pytest.mark.parametrize(("is_idle", "seconds"), [(True, (0.0, 1e9)), (False, (1e9, 0.0))])
def test_an_ended_request_is_freed_when_it_is_time(is_idle: bool, seconds: tuple[float, float]) -> None:
    collector = QuietCollector(*seconds)
    ended = ended_request()
    collector.look(is_idle=not is_idle)
    assert ended() is not None  # the request and its sequence refer to each other
    with no_garbage_collection():
        collector.look(is_idle=is_idle)
    assert ended() is not None  # a pause holds
    collector.look(is_idle=is_idle)
    assert ended() is None


def test_objects_of_the_start_are_not_looked_at_again() -> None:
    before = gc.get_freeze_count()
    QuietCollector()
    assert gc.get_freeze_count() > before + 1000
