"""Sleep: an engine that gives its memory back until it is woken.

    level 1   the pages of the cache; all prefixes, branches and kept conversations are forgotten, but for the blocks
              that tiers have: these come back after waking. On a GPU the weights move to pinned memory of the host
    level 2   the cache and the prepared weights: waking prepares them again from the model's files

Requests that are in flight keep their tokens and wait; they are computed again after waking. All addresses stay valid,
those in captured graphs included: on a CPU the system maps zeros when they are touched again, and an arena
(`kernels.arena`) maps memory of the device when it wakes.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from bifolio.engine.engine import InferenceEngine
from bifolio.errors import ConfigError
from bifolio.kernels.storage import KVStorage
from bifolio.model.weights import ModelWeights

PARTS = ("weights", "kv_cache")
FLUSH_SECONDS = 10.0  # for writing blocks to the tiers
_DONT_NEED = 4  # of Linux: the next access maps zeros


def fall_asleep(engine: InferenceEngine, level: int) -> None:
    """Give memory back, between two steps."""
    if level not in (1, 2):
        raise ConfigError(f"the level of sleep is 1 (the cache) or 2 (the cache and the weights), not {level!r}")
    check_can_sleep(engine)
    engine.take_back()
    while engine.batcher.drop_kept():
        pass
    if engine.tiers is not None:
        engine.tiers.settle(engine, FLUSH_SECONDS)
        engine.tiers.copies.flush(FLUSH_SECONDS)
    engine.blocks.drop_cached()
    arena = engine.runner.kernels.arena
    if arena is not None:
        arena.sleep(keep_weights=level == 1)
        engine.asleep |= set(PARTS)
        return
    release_cache(engine.runner.storage)
    engine.asleep |= {"kv_cache"} if level == 1 else set(PARTS)
    if level == 2:
        engine.runner.weights = None  # type: ignore[assignment]
        engine.runner.programs.clear()
    gc.collect()
    _trim()


def wake(engine: InferenceEngine, tags: Sequence[str] | None, weights: ModelWeights | None) -> None:
    """Wake the parts that `tags` names, by default all; `weights` are prepared ones if these slept."""
    checked_tags(tags)
    woken = set(PARTS if tags is None else tags) & engine.asleep
    arena = engine.runner.kernels.arena
    if arena is not None:
        arena.wake(woken)
        if weights is not None:
            arena.refill(engine.runner.weights, weights)
    elif weights is not None:
        engine.runner.exchange(weights)
    engine.asleep -= woken


def checked_tags(tags: Iterable[str] | None) -> None:
    for tag in tags or ():
        if tag not in PARTS:
            raise ConfigError(f"the parts of an engine that wake are {' and '.join(PARTS)}, not {tag!r}")


def needs_weights(engine: InferenceEngine, tags: Iterable[str] | None) -> bool:
    """Whether weights that are to wake must be prepared from the model's files."""
    if "weights" not in engine.asleep or (tags is not None and "weights" not in tags):
        return False
    arena = engine.runner.kernels.arena
    return arena is None or not arena.keeps_weights


def check_can_sleep(engine: InferenceEngine) -> None:
    """Refuse to sleep where memory could not be given back, or other memory refers to it."""
    method = None if engine.config.speculative is None else engine.config.speculative.method
    if engine.runner.peers is not None or method not in (None, "ngram"):
        raise ConfigError("an engine sleeps in one process and without a draft model: make a new LLM")
    if is_on_device(engine) and engine.runner.kernels.arena is None:
        raise ConfigError(
            "an engine on a GPU sleeps if it was started for it: pass enable_sleep_mode (--enable-sleep-mode) to a "
            "new LLM, on a driver that can map memory"
        )


def is_on_device(engine: InferenceEngine) -> bool:
    """Whether weights and cache are in the memory of a device."""
    return engine.slots.device is not None or engine.runner.kernels.memory() is not None


def release_cache(storage: KVStorage) -> None:
    """Give the pages of all keys, values and states back to the system."""
    groups = (storage.keys, storage.values, storage.convolutions, storage.recurrent)
    for array in {id(array): array for group in groups for array in group}.values():
        _release(array)


def _release(array: Any) -> None:
    """Drop the whole pages of an array: on Linux the system takes them, elsewhere they are written with zeros."""
    start = array.ctypes.data if isinstance(array, np.ndarray) else array.data_ptr()
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (start + array.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
    if sys.platform == "linux" and length > 0:
        system = ctypes.CDLL(None, use_errno=True)
        if not system.madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), _DONT_NEED):
            return
    array[...] = 0


def _trim() -> None:
    """Let the allocator return freed memory to the system."""
    trim: Any = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
