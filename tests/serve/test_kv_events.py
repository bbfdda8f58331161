"""KV events on the wire and metrics under vLLM's names, as a gateway reads them."""

from __future__ import annotations

import re
import time
from typing import Any

import msgspec
import pytest
from serving import ENGINE, running_server

from bifolio.api.messages import KvEventSettings
from bifolio.cache.digests import next_digest, root_digest
from bifolio.cache.events import CacheEvents, Cleared, Removed, Stored
from bifolio.serve.process import kv_events
from bifolio.serve.process.kv_events import KvEventPublisher, short_hash

zmq = pytest.importorskip("zmq")
ANY = KvEventSettings("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", "kv@test")


class Subscriber:
    """Reads batches without a type: lists, numbers and strings, as a program in another language would."""

    def __init__(self, endpoint: str, replay: str) -> None:
        self.context = zmq.Context()
        self.sub = self.context.socket(zmq.SUB)
        self.sub.setsockopt_string(zmq.SUBSCRIBE, "kv@")
        self.sub.connect(endpoint)
        self.request = self.context.socket(zmq.DEALER)  # many answers to one request
        self.request.connect(replay)

    def next(self) -> tuple[int, Any]:
        assert self.sub.poll(10_000), "no event came"
        topic, number, body = self.sub.recv_multipart()
        assert topic == b"kv@test"
        return int.from_bytes(number, "big"), msgspec.msgpack.decode(body)

    def replay(self, first: int) -> list[tuple[int, Any]]:
        self.request.send_multipart((b"", first.to_bytes(8, "big")))
        found = []
        while True:
            assert self.request.poll(10_000), "no replay came"
            _, number, body = self.request.recv_multipart()
            if not body:
                assert int.from_bytes(number, "big", signed=True) == -1
                return found
            found.append((int.from_bytes(number, "big"), msgspec.msgpack.decode(body)))

    def close(self) -> None:
        self.context.destroy(linger=0)


def test_layout_numbers_and_replay() -> None:
    events = CacheEvents()
    publisher = KvEventPublisher(events, 2, ANY)
    subscriber = Subscriber(publisher.endpoint, publisher.replay_endpoint)
    try:
        root, salted = root_digest(b""), root_digest(b"tenant")
        chain = [next_digest(root, [7, 8])]
        chain.append(next_digest(chain[0], [9, 10]))
        events.record(Stored(chain, root, root, [7, 8, 9, 10]))
        events.record(Stored([b"x" * 16], salted, salted, [1, 2]))
        events.record(Removed(chain[1]))
        events.record(Removed(b"x" * 16))
        events.record(Cleared())
        history = subscriber.replay(0)
        while sum(len(batch[1]) for _, batch in history) < 5:
            history = subscriber.replay(0)
        assert subscriber.replay(len(history) - 1) == history[-1:]
        for _ in range(600):  # a socket misses all that is published before its subscription arrives
            events.record(Cleared())
            if subscriber.sub.poll(100):
                break
        number, live = subscriber.next()
        while number < len(history):
            number, live = subscriber.next()
        assert live[1][0] == ["AllBlocksCleared"]
    finally:
        subscriber.close()
        publisher.close()
    hashes = [short_hash(digest) for digest in chain]
    other = short_hash(b"x" * 16)
    bodies = [batch for _, batch in history]
    assert [number for number, _ in history] == list(range(len(history)))
    assert bodies[0][1] == [["AllBlocksCleared"]]
    assert [event for body in bodies[1:] for event in body[1]] == [
        ["BlockStored", hashes, None, [7, 8, 9, 10], 2, None, "GPU", None, None],
        ["BlockStored", [other], None, [1, 2], 2, None, "GPU", None, [[salted.hex()]]],
        ["BlockRemoved", [hashes[1], other], "GPU"],
        ["AllBlocksCleared"],
    ]
    assert all(isinstance(body[0], float) and body[2] == 0 for body in bodies)


@pytest.mark.full
def test_a_server_publishes_its_cache_and_vllms_names() -> None:
    with running_server(kv_events=ANY, metrics_compat="vllm") as server:
        hello = server.context.engine.hello
        assert hello is not None
        assert hello.kv_events is not None
        subscriber = Subscriber(hello.kv_events.endpoint, hello.kv_events.replay_endpoint)
        try:
            prompt = list(range(3, 3 + 4 * ENGINE["block_size"]))  # type: ignore[operator]
            body: dict[str, Any] = {"prompt": prompt, "max_tokens": 2, "temperature": 0.0}
            with server.http() as http:
                answers = [http.post("/v1/completions", json=body).json() for _ in range(3)]
                assert answers[-1]["usage"]["prompt_tokens_details"]["cached_tokens"]
                page = http.get("/metrics").text
                deadline = time.monotonic() + 60.0
                idle, hits = r"^vllm:num_requests_running{.*} 0\.0$", r"^vllm:prefix_cache_hits_total{.*} [1-9]"
                while not (re.search(idle, page, re.MULTILINE) and re.search(hits, page, re.MULTILINE)):
                    assert time.monotonic() < deadline, page  # counters come with heartbeats
                    time.sleep(0.1)
                    page = http.get("/metrics").text
            history = subscriber.replay(0)
            while not any(event[0] == "BlockStored" for _, batch in history for event in batch[1]):
                history = subscriber.replay(0)
        finally:
            subscriber.close()
    assert [number for number, _ in history] == list(range(len(history)))
    stored = [event for _, batch in history for event in batch[1] if event[0] == "BlockStored"]
    parent, expected = root_digest(b""), []
    for start in range(0, len(prompt), 8):
        parent = next_digest(parent, prompt[start : start + 8])
        expected.append(short_hash(parent))
    assert [one for event in stored for one in event[1]][: len(expected)] == expected
    assert [token for event in stored for token in event[3]][: len(prompt)] == prompt
    for name in ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc"):
        assert re.search(rf'^vllm:{name}{{engine="0",model_name="tiny"}} 0\.0$', page, re.MULTILINE), name
    assert re.search(r"^vllm:prefix_cache_hits_total{.*} [1-9]", page, re.MULTILINE)
    assert re.search(r"^vllm:prefix_cache_queries_total{.*} [1-9]", page, re.MULTILINE)
    sizes = re.search(r"^vllm:cache_config_info{(.*)} 1\.0$", page, re.MULTILINE)
    assert sizes is not None
    assert {'block_size="8"', 'num_gpu_blocks="511"'} <= set(sizes[1].split(","))
    assert re.search(r"^vllm:lora_requests_info{max_lora=\"0\",running_lora_adapters=\"\",.*} 1\.\d+e\+09$", page, re.M)
    assert "bifolio:num_requests_waiting 0.0" in page


def test_large_batches_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "MAX_BATCH_BYTES", 200)
    events = CacheEvents()
    root = root_digest(b"")
    for token in range(40):
        events.record(Stored([bytes([token]) * 16], root, root, [token, token]))
    publisher = KvEventPublisher(events, 2, ANY)
    subscriber = Subscriber(publisher.endpoint, publisher.replay_endpoint)
    try:
        history = subscriber.replay(0)
        while sum(len(batch[1]) for _, batch in history) < 41:
            history = subscriber.replay(0)
    finally:
        subscriber.close()
        publisher.close()
    assert max(len(msgspec.msgpack.encode(batch)) for _, batch in history) <= 200
    assert [event[3][0] for _, batch in history for event in batch[1] if event[0] == "BlockStored"] == list(range(40))
