"""Prefill and decode of hybrid models on two engines: blocks travel with the recurrent state behind them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from test_transfer import SECRET, Running, served

from bifolio.engine.transfer import decode as decode_side
from bifolio.engine.transfer import prefill as prefill_side
from bifolio.engine.transfer.decode import BlockFetcher
from bifolio.errors import CacheError
from bifolio.kernels.storage import CacheLayout, KVStorage, StateLayout
from helpers import cpu_kernel_names, make_engine, make_kernels, random_prompt
from hybrid_models import VOCABULARY, tiny_hybrid

pytestmark = pytest.mark.full
BLOCK, CHUNK = 4, 8
KERNELS = cpu_kernel_names()[0]


@pytest.fixture
def engines() -> Iterator[Callable[..., Running]]:
    made: list[Running] = []

    def make(kind: str = "delta", **options: Any) -> Running:
        sizes = {"num_blocks": 64, "block_size": BLOCK, "max_model_len": 128, "chunk_size": CHUNK, "max_num_seqs": 4,
                 "checkpoint_tokens": 16}  # fmt: skip
        engine = make_engine(tiny_hybrid(kind), kernels=make_kernels(KERNELS), **{**sizes, **options})
        made.append(Running(SimpleNamespace(engine=engine)))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for each in made:
        each.stop()
        assert each.llm.engine.blocks.state_stats().num_held_states == 0
        each.llm.engine.blocks.check_invariants()


def prompt_of(length: int) -> list[int]:
    return random_prompt(length, seed=length, vocab_size=VOCABULARY)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("kind", ["conv", "delta", "lightning", "mamba", "wide conv"])
@pytest.mark.parametrize("length", [1, 5, 63, 100])
def test_output_equals_that_of_one_engine(
    engines: Callable[..., Running], kind: str, length: int, shared: bool
) -> None:
    prompt = prompt_of(length)
    expected, _ = engines(kind).generate(prompt)
    prefill, decode = engines(kind), engines(kind)
    server, address = served(prefill, shared=shared)
    fetched = BlockFetcher(decode.thread, decode.sizes, SECRET, shared).fetch(address, prompt)
    assert fetched == ((length - 1) // BLOCK, True)
    found, num_cached = decode.generate(prompt)
    assert found == expected
    assert num_cached == (length - 1) // BLOCK * BLOCK  # the state at the end of the prompt's blocks came with them
    server.close()


def test_a_second_turn_fetches_the_new_blocks_alone(engines: Callable[..., Running]) -> None:
    prefill, decode = engines(), engines()
    server, address = served(prefill)
    fetcher = BlockFetcher(decode.thread, decode.sizes, SECRET)
    longer = prompt_of(61)
    assert fetcher.fetch(address, longer[:40]).num_blocks == 9
    assert fetcher.fetch(address, longer).num_blocks == 15 - 9
    assert fetcher.fetch(address, longer).num_blocks == 0
    found, num_cached = decode.generate(longer)
    assert num_cached == 60
    assert found == engines().generate(longer)[0]
    server.close()


@pytest.mark.parametrize("cut", [0, 3, 7, 13])
def test_a_transfer_that_breaks_costs_a_recomputation(
    engines: Callable[..., Running], monkeypatch: pytest.MonkeyPatch, cut: int
) -> None:
    """The connection breaks after `cut` blocks and states: blocks without a state behind them are computed again."""
    prompt = prompt_of(50)
    expected, _ = engines().generate(prompt)
    prefill, decode = engines(), engines()
    server, address = served(prefill, shared=False)
    honest, sent = prefill_side.checksum, [0]

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


def test_a_damaged_state_is_not_used(engines: Callable[..., Running], monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = prompt_of(50)
    expected, _ = engines().generate(prompt)
    prefill, decode = engines(), engines()
    server, address = served(prefill)
    honest, state_bytes = decode_side.receive_into, decode.sizes.state_bytes

    def damaging(connection: Any, target: memoryview) -> None:
        honest(connection, target)
        if len(target) == state_bytes:
            target[7] ^= 1

    monkeypatch.setattr(decode_side, "receive_into", damaging)
    assert not BlockFetcher(decode.thread, decode.sizes, SECRET).fetch(address, prompt).is_whole
    found, num_cached = decode.generate(prompt)
    assert found == expected
    assert num_cached == 0
    server.close()


def test_a_pool_without_a_free_state_takes_the_blocks_alone(engines: Callable[..., Running]) -> None:
    """All states are held: the prompt is computed again, and the answer is the same."""
    prompt = prompt_of(50)
    expected, _ = engines().generate(prompt)
    prefill, decode = engines(), engines()
    pool = decode.llm.engine.blocks._states.pool  # type: ignore[union-attr]
    taken = []
    while (state := pool.try_take()) is not None:
        taken.append(state)
    server, address = served(prefill)
    assert BlockFetcher(decode.thread, decode.sizes, SECRET).fetch(address, prompt).num_blocks == 12
    for state in taken:
        pool.drop(state)
    found, num_cached = decode.generate(prompt)
    assert found == expected
    assert num_cached == 0
    server.close()


@pytest.mark.parametrize("backend", ["numpy", "torch"])
@pytest.mark.parametrize("heads", [0, 2])
def test_a_state_is_copied_between_storages(backend: Any, heads: int) -> None:
    if backend == "torch":
        pytest.importorskip("torch")
    size = 8 if heads else 0
    states = (StateLayout(4, 6, heads, size, size),) * 2
    layout = CacheLayout(1, 3, 4, 2, 8, "f32", states=states, num_states=3)
    source, target = (KVStorage(layout, backend=backend) for _ in range(2))
    rng = np.random.default_rng(0)
    for array in (*source.convolutions, *source.recurrent):
        values = rng.standard_normal(tuple(array.shape)).astype(np.float32)
        array[:] = values if backend == "numpy" else pytest.importorskip("torch").from_numpy(values)
    target.write_state(2, source.read_state(1))
    for ours, theirs in zip(
        (*target.convolutions, *target.recurrent), (*source.convolutions, *source.recurrent), strict=True
    ):
        assert (ours[2] == theirs[1]).all()
        assert (ours[1] == 0).all()
    with pytest.raises(CacheError, match="a state has"):
        target.write_state(1, np.zeros(3, np.uint8))
