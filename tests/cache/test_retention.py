"""Blocks that are evicted last: order, time, and bounds for each client and for all."""

from __future__ import annotations

import random

import pytest

from bifolio.cache.block_manager import KVCacheBlockManager
from bifolio.cache.retention import SHARE_OF_ALL, SHARE_OF_OWNER
from bifolio.sessions import SessionHint

BLOCK = 4


def fill(manager: KVCacheBlockManager, tokens: list[int], name: str = "", owner: str = "", **hint: float) -> None:
    """One request from begin to end."""
    sequence = manager.fresh_sequence_id()
    held = manager.open_table(sequence, tokens)
    manager.append(sequence, len(tokens) - held)
    manager.commit(sequence, tokens, len(tokens))
    if name:
        manager.protect(sequence, owner, SessionHint(name, **hint), tokens, b"")  # type: ignore[arg-type]
    manager.release(sequence)
    manager.check_invariants()


def text(number: int, length: int = 16) -> list[int]:
    return [1000 * number + place for place in range(length)]


def cached(manager: KVCacheBlockManager, tokens: list[int]) -> int:
    return manager.cached_prefix_length([*tokens, 7])


def test_protected_blocks_are_evicted_last_and_never_withheld() -> None:
    manager = KVCacheBlockManager(33, BLOCK)
    fill(manager, text(1), "kept", "a")
    for number in range(2, 40):
        fill(manager, text(number))
    assert cached(manager, text(1)) == 16
    assert cached(manager, text(5)) == 0
    fill(manager, text(99, 128))  # all blocks of the cache
    assert cached(manager, text(99, 128)) == 128
    assert cached(manager, text(1)) == 0


def test_protection_ends_with_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("bifolio.cache.retention.time.monotonic", lambda: now[0])
    manager = KVCacheBlockManager(33, BLOCK)
    fill(manager, text(1), "short", "a", seconds=10.0)
    fill(manager, text(2), "long", "a", seconds=1000.0)
    now[0] += 20
    for number in range(3, 40):
        fill(manager, text(number))
    assert (cached(manager, text(1)), cached(manager, text(2))) == (0, 16)
    assert manager.release_session("a", "long")
    assert not manager.release_session("a", "long")
    for number in range(40, 80):
        fill(manager, text(number))
    assert cached(manager, text(2)) == 0


def test_clients_protect_a_part_of_the_cache_at_most() -> None:
    manager = KVCacheBlockManager(65, BLOCK)
    generator = random.Random(1)
    for number in range(200):
        owner, name = generator.choice("abcdef"), str(generator.randrange(9))
        fill(manager, text(number, 4 * generator.randrange(1, 12)), name, owner, pin=generator.random() < 0.5)
        sessions = [one for one, _ in manager.sessions()]
        assert sum(one.num_protected for one in sessions) <= 65 * SHARE_OF_ALL
        for each in "abcdef":
            assert sum(one.num_protected for one in sessions if one.owner == each) <= 65 * SHARE_OF_OWNER
        protected = {digest for one in sessions for digest in one.digests[: one.num_protected]}
        assert protected == set(manager._pool.retention.protected)
    for one, _ in manager.sessions():
        manager.release_session(one.owner, one.hint.name)
    assert not manager._pool.retention.protected
