"""Sleep: an engine that gives its memory back until it is woken.

    level 1   the pages of the cache; all prefixes, branches and kept conversations are forgotten, but for the blocks
              that tiers have: these come back after waking
    level 2   these, and the prepared weights: waking prepares them again from the model's files

Requests that are in flight keep their tokens and wait; they are computed again after waking. Nothing moves: the
addresses of the cache stay valid, and the system maps zeros when they are touched again.
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
        engine.tiers.copies.flush(FLUSH_SECONDS)
    engine.blocks.drop_cached()
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
    woken = set(PARTS if tags is None else tags)
    if weights is not None:
        engine.runner.exchange(weights)
    engine.asleep -= woken


def checked_tags(tags: Iterable[str] | None) -> None:
    for tag in tags or ():
        if tag not in PARTS:
            raise ConfigError(f"the parts of an engine that wake are {' and '.join(PARTS)}, not {tag!r}")


def check_can_sleep(engine: InferenceEngine) -> None:
    """Refuse to sleep where memory could not be given back, or other memory refers to it."""
    method = None if engine.config.speculative is None else engine.config.speculative.method
    on_device = engine.slots.device is not None or engine.runner.kernels.memory() is not None
    if on_device or engine.runner.peers is not None or method not in (None, "ngram"):
        raise ConfigError("an engine sleeps on the CPU, in one process and without a draft model: make a new LLM")


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
