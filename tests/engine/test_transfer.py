"""Prefill and decode on two engines: output is that of one engine, whatever happens to the transfer."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from running_engine import Running

from bifolio import LLM
from bifolio.config.transfer import Address
from bifolio.engine.transfer import decode as decode_side
from bifolio.engine.transfer import prefill as prefill_side
from bifolio.engine.transfer import wire
from bifolio.engine.transfer.blocks import read_blocks
from bifolio.engine.transfer.decode import BlockFetcher
from bifolio.engine.transfer.prefill import PrefillServer
from bifolio.errors import CacheError, ConfigError, TransferError
from bifolio.handshakes import Handshakes
from helpers import kv_storage, random_prompt, tiny_folder

pytestmark = pytest.mark.full
BLOCK = 4
SECRET = "between engines"


@cache
def folder(seed: int = 0) -> Path:
    return tiny_folder(seed=seed)


def running(**options: Any) -> Running:
    sizes = {"num_blocks": 64, "block_size": BLOCK, "max_model_len": 128, "chunk_size": 8, "max_num_seqs": 4}
    return Running(LLM(folder(options.pop("seed", 0)), poison_free_blocks=True, threads=1, **{**sizes, **options}))


@pytest.fixture
def engines() -> Iterator[Callable[..., Running]]:
    made: list[Running] = []

    def make(**options: Any) -> Running:
        made.append(running(**options))
        return made[-1]

    yield make
    for each in made:
        each.stop()


def served(prefill: Running, **options: Any) -> tuple[PrefillServer, Address]:
    server = PrefillServer(prefill.thread, prefill.sizes, secret=SECRET, **options)
    return server, Address(server.host, server.port)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("length", [1, 4, 5, 63, 100])
def test_output_equals_that_of_one_engine(engines: Callable[..., Running], length: int, shared: bool) -> None:
    prompt = random_prompt(length, seed=length, vocab_size=61)
    expected, _ = engines().generate(prompt)
    prefill, decode = engines(), engines()
    server, address = served(prefill, shared=shared)
    assert (
        BlockFetcher(decode.thread, decode.sizes, SECRET, shared).fetch(address, prompt).num_blocks
        == (length - 1) // BLOCK
    )
    found, num_cached = decode.generate(prompt)
    assert found == expected
    assert num_cached == (length - 1) // BLOCK * BLOCK  # only the last tokens were computed here
    server.close()


def test_a_prompt_with_few_new_tokens_is_computed_here(engines: Callable[..., Running]) -> None:
    """The second turn of a conversation whose first is cached: the other engine would compute all of it again."""
    prefill, decode = engines(), engines()
    server, address = served(prefill)
    fetcher = BlockFetcher(decode.thread, decode.sizes, SECRET, threshold=20)
    first = random_prompt(40, vocab_size=61)
    longer = first + random_prompt(60, 3, 61)
    decode.generate(first)
    assert fetcher.fetch(address, longer[:50]).num_blocks == 0
    assert fetcher.fetch(address, longer).num_blocks > 0
    assert decode.generate(longer)[0] == engines().generate(longer)[0]
    server.close()


def test_a_second_turn_fetches_the_new_blocks_alone(engines: Callable[..., Running]) -> None:
    prefill, decode = engines(), engines()
    server, address = served(prefill)
    fetcher = BlockFetcher(decode.thread, decode.sizes, SECRET)
    first, longer = random_prompt(40, vocab_size=61), random_prompt(40, vocab_size=61) + random_prompt(21, 3, 61)
    assert fetcher.fetch(address, first).num_blocks == 9
    assert fetcher.fetch(address, longer).num_blocks == 15 - 9
    assert fetcher.fetch(address, longer).num_blocks == 0
    server.close()


def test_tenants_do_not_share_blocks(engines: Callable[..., Running]) -> None:
    prefill, decode = engines(), engines()
    server, address = served(prefill)
    prompt = random_prompt(30, vocab_size=61)
    assert BlockFetcher(decode.thread, decode.sizes, SECRET).fetch(address, prompt, b"tenant a").num_blocks == 7
    assert decode.generate(prompt, b"tenant b")[1] == 0
    assert decode.generate(prompt, b"tenant a")[1] == 28
    server.close()


@pytest.mark.parametrize("cut", [0, 1, 3])
def test_a_prefill_engine_that_ends_in_the_middle_costs_a_recomputation(
    engines: Callable[..., Running], monkeypatch: pytest.MonkeyPatch, cut: int
) -> None:
    """The connection breaks after `cut` blocks, inside the next one."""
    prompt = random_prompt(50, seed=9, vocab_size=61)
    expected, _ = engines().generate(prompt)
    prefill, decode = engines(), engines()
    server, address = served(prefill, shared=False)
    honest, sent = wire.checksum, [0]

    def breaking(block: np.ndarray) -> bytes:
        sent[0] += 1
        if sent[0] > cut:
            raise ConnectionResetError("killed")
        return honest(block)

    monkeypatch.setattr(prefill_side, "checksum", breaking)
    BlockFetcher(decode.thread, decode.sizes, SECRET, shared=False).fetch(address, prompt)
    found, num_cached = decode.generate(prompt)
    assert found == expected
    assert num_cached <= cut * BLOCK
    server.close()


def test_a_silent_prefill_engine_costs_a_recomputation(
    engines: Callable[..., Running], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine that answers the pull and then nothing more, as one whose host was lost."""
    monkeypatch.setattr(decode_side, "SILENT_SECONDS", 0.2)
    prompt = random_prompt(50, seed=9, vocab_size=61)
    expected, _ = engines().generate(prompt)
    decode = engines()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                wire.receive_pull(connection, SECRET, 128)
                wire.send_json(connection, {"block_bytes": decode.sizes.block_bytes, "is_shared": False})
                connection.recv(1)  # until the other side gives up

        threading.Thread(target=serve, daemon=True).start()
        fetcher = BlockFetcher(decode.thread, decode.sizes, SECRET, shared=False)
        assert fetcher.fetch(Address("127.0.0.1", listener.getsockname()[1]), prompt) == (0, False)
    assert "timed out" in caplog.text
    assert decode.generate(prompt)[0] == expected


@pytest.mark.parametrize("limit", [60.0, 0.3])
def test_a_slow_prefill_engine_shows_life(
    engines: Callable[..., Running], monkeypatch: pytest.MonkeyPatch, limit: float
) -> None:
    """A step that takes longer than silence is allowed to: the transfer goes on, up to the limit between two blocks."""
    monkeypatch.setattr(prefill_side, "WAIT_SECONDS", 0.05)
    monkeypatch.setattr(decode_side, "SILENT_SECONDS", 1.0)
    monkeypatch.setattr(decode_side, "BLOCK_SECONDS", limit)
    prompt = random_prompt(50, seed=9, vocab_size=61)
    expected, _ = engines().generate(prompt)
    prefill, decode = engines(), engines()
    server, address = served(prefill)
    prefill.thread.call(lambda engine: time.sleep(1.5))
    found = BlockFetcher(decode.thread, decode.sizes, SECRET).fetch(address, prompt)
    assert found == ((49 // BLOCK, True) if limit > 1 else (0, False))
    assert decode.generate(prompt)[0] == expected
    server.close()


def test_a_damaged_block_is_not_used(engines: Callable[..., Running], monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = random_prompt(50, seed=9, vocab_size=61)
    expected, _ = engines().generate(prompt)
    prefill, decode = engines(), engines()
    server, address = served(prefill)
    honest = read_blocks

    def damaging(*arguments: Any, **named: Any) -> list[np.ndarray]:
        found = honest(*arguments, **named)
        for block in found:
            block[5] ^= 1
        return found

    monkeypatch.setattr(prefill_side, "read_blocks", damaging)
    sums = iter(range(1000))
    monkeypatch.setattr(prefill_side, "checksum", lambda block: bytes([next(sums) % 256]) * 16)
    assert BlockFetcher(decode.thread, decode.sizes, SECRET).fetch(address, prompt).num_blocks == 0
    assert decode.generate(prompt)[0] == expected
    server.close()


@pytest.mark.parametrize(
    "change", [{"seed": 1}, {"kv_cache_dtype": "f16"}, {"block_size": 8}, {"kernels": "reference"}]
)
def test_blocks_of_another_kind_of_engine_are_refused(
    engines: Callable[..., Running], change: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode = engines(**change), engines()
    server, address = served(prefill)
    prompt = random_prompt(30, vocab_size=61)
    assert BlockFetcher(decode.thread, decode.sizes, SECRET).fetch(address, prompt).num_blocks == 0
    assert "start both alike" in caplog.text
    assert decode.generate(prompt)[1] == 0
    server.close()


def test_a_wrong_secret_is_refused(engines: Callable[..., Running], caplog: pytest.LogCaptureFixture) -> None:
    prefill, decode = engines(), engines()
    server, address = served(prefill)
    assert (
        BlockFetcher(decode.thread, decode.sizes, "guessed").fetch(address, random_prompt(30, vocab_size=61)).num_blocks
        == 0
    )
    assert "does not know the secret" in caplog.text
    assert prefill.llm.engine.stats().num_prompt_tokens == 0  # nothing was computed
    server.close()


def test_silent_connections_delay_no_transfer(engines: Callable[..., Running], monkeypatch: pytest.MonkeyPatch) -> None:
    """More connections without the secret than there are places for transfers."""
    monkeypatch.setattr(prefill_side, "MAX_CONNECTIONS", 4)
    prefill, decode = engines(), engines()
    handshakes = Handshakes(most=8)
    server, address = served(prefill, handshakes=handshakes)
    silent = [socket.create_connection(address, 5) for _ in range(40)]
    try:
        began = time.monotonic()
        found = BlockFetcher(decode.thread, decode.sizes, SECRET).fetch(address, random_prompt(30, vocab_size=61))
        assert found.num_blocks == 7
        assert time.monotonic() - began < 4.0
        assert len(handshakes) <= 8
        silent[0].settimeout(5)
        assert len(silent[0].recv(100)) == wire.NONCE_BYTES
        assert silent[0].recv(100) == b""  # it made room
    finally:
        for connection in silent:
            connection.close()
        server.close()


def test_a_secret_is_proved_in_time() -> None:
    """Bytes that drip in do not extend the time."""
    ours, theirs = socket.socketpair()
    stop = threading.Event()

    def drip() -> None:
        theirs.sendall(wire.LENGTH.pack(1000))
        while not stop.wait(0.02):
            theirs.sendall(b" ")

    thread = threading.Thread(target=drip)
    thread.start()
    admitted: list[bool] = []
    began = time.monotonic()
    with pytest.raises((TransferError, TimeoutError)):
        wire.receive_pull(ours, SECRET, 100, seconds=0.3, admit=lambda: admitted.append(True))
    assert time.monotonic() - began < 3.0
    assert not admitted
    stop.set()
    thread.join()
    ours.close()
    theirs.close()


def test_no_engine_at_the_address(engines: Callable[..., Running]) -> None:
    decode = engines()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert (
        BlockFetcher(decode.thread, decode.sizes, SECRET)
        .fetch(Address("127.0.0.1", port), random_prompt(30, vocab_size=61))
        .num_blocks
        == 0
    )


def test_a_cache_without_room_takes_the_first_blocks(engines: Callable[..., Running]) -> None:
    prompt = random_prompt(100, vocab_size=61)
    expected, _ = engines().generate(prompt)
    prefill, decode = engines(), engines(num_blocks=33)
    holder = random_prompt(60, seed=4, vocab_size=61)
    table = decode.thread.call(lambda engine: engine.blocks.fresh_sequence_id()).result()
    decode.thread.call(lambda engine: engine.blocks.open_table(table)).result()
    decode.thread.call(lambda engine: engine.blocks.append(table, len(holder))).result()
    server, address = served(prefill)
    assert BlockFetcher(decode.thread, decode.sizes, SECRET).fetch(address, prompt).num_blocks == 32 - 15
    decode.thread.call(lambda engine: engine.blocks.release(table)).result()
    assert decode.generate(prompt)[0] == expected
    server.close()


def test_malformed_requests_are_refused(engines: Callable[..., Running]) -> None:
    prefill = engines()
    server, address = served(prefill)
    for sent in (b"", b"\xff" * 64, wire.LENGTH.pack(9) + b"[1, 2, 3]", wire.LENGTH.pack(2) + b"{}"):
        with socket.create_connection(address, 5) as connection:
            connection.settimeout(5)
            wire.receive_exactly(connection, wire.NONCE_BYTES)
            connection.sendall(sent)
            if sent:
                assert "error" in wire.receive_json(connection)
                time.sleep(0.05)
                connection.sendall(b"\xff" * 64)  # the connection was not reset: a late reader finds the sentence
            connection.shutdown(socket.SHUT_WR)
    assert (
        BlockFetcher(prefill.thread, prefill.sizes, SECRET).fetch(address, [5] * 9).num_blocks == 2
    )  # it still serves
    server.close()


def test_settings_are_checked(engines: Callable[..., Running]) -> None:
    decode = engines()
    with pytest.raises(ConfigError, match="with a secret only"):
        PrefillServer(decode.thread, decode.sizes, host="0.0.0.0")
    for text in ("host", "host:0", ":80", "host:port"):
        with pytest.raises(ConfigError, match="HOST:PORT"):
            Address.parse(text)
    assert Address.parse("[::1]:8200") == ("::1", 8200)


def test_a_file_that_is_no_room_is_not_opened(tmp_path: Path) -> None:
    other = tmp_path / (wire.ROOM_PREFIX + "x")
    other.write_bytes(bytes(wire.ROOM_BLOCKS * 8))
    assert wire.Room.open(str(other), 8) is None
    assert wire.Room.open("/dev/shm/../etc/passwd", 8) is None


@pytest.mark.parametrize("backend", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_a_block_is_copied_between_storages(backend: Any, dtype: Any) -> None:
    if backend == "torch":
        pytest.importorskip("torch")
    source, target = (kv_storage(2, 5, 4, 2, 8, dtype, backend=backend, poison=True) for _ in range(2))
    index = source.indices(range(12, 16))
    keys = np.random.default_rng(0).standard_normal((4, 2, 8)).astype(np.float32)
    for layer in range(2):
        data = keys + layer if backend == "numpy" else pytest.importorskip("torch").from_numpy(keys + layer)
        source.write(layer, index, data, -data)
    target.write_block(1, source.read_block(3))
    for ours, theirs in zip([*target.keys, *target.values], [*source.keys, *source.values], strict=True):
        assert (ours[1] == theirs[3]).all()
    with pytest.raises(CacheError, match="a block has"):
        target.write_block(1, np.zeros(3, np.uint8))


def test_the_end_of_a_connection_is_an_error() -> None:
    ours, theirs = socket.socketpair()
    theirs.sendall(b"abc")
    theirs.close()
    with pytest.raises(TransferError, match="closed the connection"):
        wire.receive_exactly(ours, 4)
    ours.close()
