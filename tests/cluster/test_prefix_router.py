"""The router: prefixes find their replica, load spreads, and the sets stay bounded."""

from __future__ import annotations

import random
import time
from types import SimpleNamespace

import pytest

from bifolio.cache.block_manager import KVCacheBlockManager
from bifolio.cache.events import CacheEvents, Removed
from bifolio.cluster.autoscaling import by_waiting_requests, wanted_replicas
from bifolio.cluster.prefix_router import POLICIES, CachedPrefixes, PrefixRouter, prefix_hashes

SYSTEM = list(range(64))


def router_of(*names: str) -> PrefixRouter:
    router = PrefixRouter()
    router.set_replicas(names)
    return router


def test_hashes_are_those_of_the_block_manager() -> None:
    from bifolio.serve.process.kv_events import BlockStored, as_events

    prompt = list(range(3, 40))
    manager, events = KVCacheBlockManager(20, 8), CacheEvents()
    manager.record_events(events)
    manager.open_table(1, prompt, salt=b"tenant")
    manager.append(1, len(prompt))
    manager.commit(1, prompt, len(prompt))
    (event,) = as_events(events.take(), 8)
    assert isinstance(event, BlockStored)
    assert event.block_hashes == prefix_hashes(prompt, b"tenant", 8)
    assert prefix_hashes(prompt, b"", 8) != event.block_hashes
    assert len(prefix_hashes(prompt[:32], b"", 8)) == 3  # the last token is computed anew, so its block is no hit


def test_a_conversation_stays_with_its_replica() -> None:
    router = router_of("a", "b", "c")
    chance = random.Random(1)
    homes: dict[int, str] = {}
    histories = {number: [*SYSTEM, number] for number in range(9)}
    for turn in range(4):
        for number in histories:
            histories[number] += [chance.randrange(1000) for _ in range(64)]
            hashes = prefix_hashes(histories[number], b"", 8)
            chosen = router.rank(hashes)[0].replica
            request = f"{number}-{turn}"
            router.begin(request, chosen, hashes)
            router.first_output(request)
            router.end(request)
            assert homes.setdefault(number, chosen) == chosen


def test_load_outweighs_a_prefix_at_some_point() -> None:
    router = router_of("a", "b")
    hashes = prefix_hashes(SYSTEM, b"", 8)
    router.stored("a", hashes)
    assert router.rank(hashes)[0] == ("a", len(hashes))
    for number in range(4):
        router.begin(str(number), "a", prefix_hashes([number, *range(100)], b"", 8))
    assert router.rank(hashes)[0] == ("b", 0)
    for number in range(4):
        router.end(str(number))
    assert router.rank(hashes)[0].replica == "a"
    assert router.rank(hashes, {"a": 10})[0].replica == "b"  # requests of other front ends
    router.set_silent("a", True)
    assert router.rank(hashes)[0].replica == "b"
    router.set_silent("a", False)
    assert router.rank(hashes)[0].replica == "a"


def test_unknown_prompts_spread_over_all_replicas() -> None:
    router = router_of("a", "b", "c", "d")
    for number in range(40):
        hashes = prefix_hashes([number] * 100, b"", 8)
        router.begin(str(number), router.rank(hashes)[0].replica, hashes)
    assert [router.num_open(name) for name in "abcd"] == [10, 10, 10, 10]


def test_events_and_lost_replicas_are_followed() -> None:
    router = router_of("a", "b")
    hashes = prefix_hashes(SYSTEM, b"", 8)
    router.stored("b", hashes)
    assert router.rank(hashes)[0] == ("b", 7)
    router.removed("b", hashes[3:4])
    assert router.rank(hashes)[0] == ("b", 3)
    router.cleared("b")
    assert router.rank(hashes)[0] == ("a", 0)
    router.begin("1", "b", hashes)
    router.set_replicas(["a", "c"])
    router.end("1")  # its replica is gone
    assert [choice.replica for choice in router.rank(hashes)] == ["a", "c"]
    router.stored("b", hashes)  # a late event
    assert router.replicas == ["a", "c"]


def test_the_set_of_a_replica_is_bounded() -> None:
    cached = CachedPrefixes(max_blocks=4)
    cached.add([1, 2, 3])
    cached.add([1])
    cached.add([4, 5])
    assert len(cached) == 4
    assert cached.match([1, 3, 4, 5]) == 4
    assert cached.match([2]) == 0  # the least recently used


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_ranks_all_replicas(policy: str) -> None:
    router = POLICIES[policy]()
    router.set_replicas("abc")
    seen = set()
    for number in range(30):
        hashes = prefix_hashes([number] * 20, b"", 8)
        ranked = [choice.replica for choice in router.rank(hashes)]
        assert sorted(ranked) == ["a", "b", "c"]
        router.begin(str(number), ranked[0], hashes)
        seen.add(ranked[0])
    assert seen == {"a", "b", "c"}


def test_replicas_follow_waiting_requests() -> None:
    assert wanted_replicas(2, waiting=0, running=10, slots=16) == 2
    assert wanted_replicas(2, waiting=1, running=16, slots=16) == 3
    assert wanted_replicas(2, waiting=24, running=16, slots=16) == 5
    assert wanted_replicas(4, waiting=0, running=6, slots=32) == 1
    assert wanted_replicas(4, waiting=0, running=0, slots=0) == 4
    context = SimpleNamespace(
        aggregated_metrics={"waiting": {"x": 30.0, "y": 10.0}, "running": {"x": 8.0}, "slots": {"x": 8.0, "y": 8.0}},
        current_num_replicas=2, capacity_adjusted_min_replicas=1, capacity_adjusted_max_replicas=4, policy_state={},
    )  # fmt: skip
    assert by_waiting_requests(context) == (4, {})


def test_a_follower_keeps_the_router_up_to_date() -> None:
    """Events of a real publisher reach the router, also those before the subscription and after a restart."""
    pytest.importorskip("zmq")
    from bifolio.api.messages import KvEventSettings
    from bifolio.cluster.kv_follower import KvFollower
    from bifolio.serve.process.kv_events import KvEventPublisher

    def publish(prompt: list[int], endpoint: str, replay: str) -> tuple[KvEventPublisher, CacheEvents]:
        manager, events = KVCacheBlockManager(40, 8), CacheEvents()
        manager.record_events(events)
        manager.open_table(1, prompt)
        manager.append(1, len(prompt))
        manager.commit(1, prompt, len(prompt))
        return KvEventPublisher(events, 8, KvEventSettings(endpoint, replay)), events

    def wait_for(prompt: list[int], count: int, events: CacheEvents) -> None:
        end = time.monotonic() + 10
        while router.rank(prefix_hashes(prompt, b"", 8))[0] != ("a", count):
            assert time.monotonic() < end, router.rank(prefix_hashes(prompt, b"", 8))
            time.sleep(0.02)
            events.record(Removed(b"some other block"))

    router = router_of("a")
    first, second = list(range(41)), list(range(100, 141))
    publisher, events = publish(first, "tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
    follower = KvFollower(router)
    try:
        follower.set_sources({"a": (publisher.endpoint, publisher.replay_endpoint)})
        wait_for(first, 5, events)
        publisher.close()
        publisher, events = publish(second, publisher.endpoint, publisher.replay_endpoint)  # an engine after a restart
        wait_for(second, 5, events)
        wait_for(first, 0, events)
    finally:
        follower.close()
        publisher.close()
