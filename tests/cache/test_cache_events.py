"""Events of the prefix cache: a reader that follows them knows exactly the blocks that can be found by content."""

from __future__ import annotations

import random

import pytest

from bifolio.cache.block_manager import KVCacheBlockManager
from bifolio.cache.digests import next_digest, root_digest
from bifolio.cache.events import CacheEvent, CacheEvents, Cleared, Removed, Stored

BLOCK = 4


class Follower:
    """A reader: digests that are cached according to the events, checked against their tokens."""

    def __init__(self) -> None:
        self.known: dict[bytes, bytes] = {}  # digest -> root

    def follow(self, events: list[CacheEvent]) -> None:
        for event in events:
            if isinstance(event, Stored):
                parent = event.parent
                assert len(event.token_ids) == BLOCK * len(event.digests)
                for index, digest in enumerate(event.digests):
                    assert digest == next_digest(parent, list(event.token_ids[index * BLOCK : (index + 1) * BLOCK]))
                    assert digest not in self.known
                    self.known[digest] = event.root
                    parent = digest
            elif isinstance(event, Removed):
                del self.known[event.digest]
            else:
                self.known.clear()


@pytest.mark.parametrize("seed", range(8))
def test_events_follow_the_cache(seed: int) -> None:
    chance = random.Random(seed)
    manager, events, follower = KVCacheBlockManager(12, BLOCK), CacheEvents(), Follower()
    manager.record_events(events)
    tokens: dict[int, list[int]] = {}
    for number in range(300):
        choice = chance.random()
        if choice < 0.4:
            prompt = [chance.randrange(2) for _ in range(chance.randrange(1, 20))]
            held = manager.open_table(number, prompt, salt=chance.choice([b"", b"tenant"]))
            if manager.try_append(number, len(prompt) - held):
                manager.take_moves()
                manager.commit(number, prompt, len(prompt))
                tokens[number] = prompt
            else:
                manager.release(number)
        elif choice < 0.6 and tokens:
            one = chance.choice(list(tokens))
            if manager.try_append(one, 1):
                manager.take_moves()
                tokens[one].append(chance.randrange(2))
                manager.commit(one, tokens[one], len(tokens[one]))
        elif choice < 0.7 and tokens:
            one = chance.choice(list(tokens))
            kept = chance.randrange(len(tokens[one]) + 1)
            manager.truncate(one, kept)
            del tokens[one][kept:]
        elif choice < 0.98 and tokens:
            one = chance.choice(list(tokens))
            manager.release(one)
            del tokens[one]
        elif choice > 0.99:
            manager.drop_cached()
        if chance.random() < 0.3:
            follower.follow(events.take())
            assert set(follower.known) == set(manager._pool.cached)
    follower.follow(events.take())
    assert set(follower.known) == set(manager._pool.cached)


def test_salts_have_roots_of_their_own() -> None:
    manager, events = KVCacheBlockManager(12, BLOCK), CacheEvents()
    manager.record_events(events)
    for number, salt in enumerate((b"", b"a")):
        manager.open_table(number, [1, 2, 3, 4, 5], salt=salt)
        manager.append(number, 5)
        manager.commit(number, [1, 2, 3, 4, 5], 5)
    first, second = events.take()
    assert isinstance(first, Stored)
    assert isinstance(second, Stored)
    assert (first.root, second.root) == (root_digest(b""), root_digest(b"a"))
    assert first.digests != second.digests


def test_a_full_queue_is_replaced_by_one_event() -> None:
    events = CacheEvents(max_events=3)
    for number in range(5):
        events.record(Removed(bytes([number])))
    assert events.take() == [Cleared(), Removed(b"\x03"), Removed(b"\x04")]
    assert events.num_overflows == 1
    assert events.take() == []
