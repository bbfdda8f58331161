"""Tiers below a device's cache: blocks leave for pinned memory and files, and come back beside the steps of others."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from test_cache_tiers_machine import AlwaysRead, TierMachine
from test_engine_machine import EngineMachine

from bifolio import LLM, SamplingParams
from bifolio.config import TierSettings
from bifolio.kernels.torch_copies import PinnedPool, TorchCopies
from draft_heads import eagle_folder
from helpers import drain, random_prompt, tiny_folder
from hybrid_models import VOCABULARY, tiny_hybrid

pytestmark = pytest.mark.usefixtures("compiled")  # Triton's interpreter launches from one thread alone
NewEngine = Callable[..., Any]
BLOCK = 4
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
LENGTHS = (97, 98, 99, 101, 102, 103)


def prompt_of(length: int) -> list[int]:
    return random_prompt(length, seed=length, vocab_size=VOCABULARY)


def run(engine: Any, prompt: list[int], params: SamplingParams = GREEDY) -> tuple[list[int], int]:
    """Tokens, and the cached tokens of the prompt."""
    request = engine.add_request(f"r-{engine.stats().num_prompt_tokens}-{len(prompt)}", prompt, params)
    drain(engine, 100_000)
    assert request.error is None
    return list(request.sequences[0].output_token_ids), request.metrics.num_cached_tokens


def with_tiers(new_engine: NewEngine, **options: Any) -> Any:
    engine = new_engine(poison=True, **options)
    engine.tiers.costs = AlwaysRead()
    return engine


def end(engine: Any) -> None:
    engine.close()
    assert engine.blocks.num_used_blocks == 0
    assert engine.blocks.state_stats().num_held_states == 0
    engine.blocks.check_invariants()


@pytest.mark.parametrize("kind", ["plain", "delta"])
def test_prompts_larger_than_the_cache_come_back_from_memory(new_engine: NewEngine, kind: str) -> None:
    """Prompts of three times the cache, in turns: from the second round on, all are read from pinned memory."""
    options: dict[str, Any] = {"num_blocks": 48}
    if kind != "plain":
        options |= {"model": tiny_hybrid(kind), "checkpoint_tokens": 16}
    plain = new_engine(**{**options, "num_blocks": 400})
    engine = with_tiers(new_engine, **options, tiers=TierSettings(memory_bytes=32 << 20))
    for turn in range(2):
        for length in LENGTHS:
            found, num_cached = run(engine, prompt_of(length))
            assert found == run(plain, prompt_of(length))[0]
            if turn:
                assert num_cached >= (length - 1) // BLOCK * BLOCK - BLOCK
    assert engine.stats().tiers.num_tier_hits > 0
    end(engine)


@pytest.mark.parametrize("kind", ["plain", "delta"])
def test_the_next_engine_reads_the_files_of_the_first(new_engine: NewEngine, tmp_path: Path, kind: str) -> None:
    options: dict[str, Any] = {"tiers": TierSettings(memory_bytes=1 << 20, folder=tmp_path)}
    if kind != "plain":
        options |= {"model": tiny_hybrid(kind), "checkpoint_tokens": 16}
    first = with_tiers(new_engine, **options)
    expected, _ = run(first, prompt_of(100))
    longer = [*prompt_of(100), *expected, *prompt_of(9)]
    end(first)
    second = with_tiers(new_engine, **options)
    assert run(second, prompt_of(100)) == (expected, 96)
    assert run(second, longer)[1] >= 100
    end(second)
    for path in tmp_path.rglob("*.block"):
        path.write_bytes(path.read_bytes()[:-1])
    third = with_tiers(new_engine, **options)
    assert run(third, prompt_of(100)) == (expected, 0)
    end(third)


def test_blocks_come_back_bit_for_bit(new_engine: NewEngine) -> None:
    engine = with_tiers(new_engine, num_blocks=64, tiers=TierSettings(memory_bytes=32 << 20))
    prompt, manager, storage = prompt_of(100), engine.blocks, engine.runner.storage

    def stored() -> list[bytes]:
        with manager.lock:
            manager.open_table(-5, prompt)
            blocks = [storage.read_block(block_id).tobytes() for block_id in manager.block_ids_of(-5)]
            manager.release(-5)
        return blocks

    run(engine, prompt)
    before = stored()
    assert len(before) == 24
    assert engine.tiers.copies.flush(10)
    keeper, engine.blocks._pool.keeper = engine.blocks._pool.keeper, None
    manager.drop_cached()  # the tier keeps its copies
    engine.blocks._pool.keeper = keeper
    assert stored() == []
    assert run(engine, prompt)[1] == 96
    assert stored() == before
    end(engine)


def test_other_requests_go_on_while_blocks_are_on_their_way(
    new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = with_tiers(new_engine, num_blocks=70, tiers=TierSettings(memory_bytes=32 << 20))
    expected, _ = run(engine, prompt_of(100))
    run(engine, prompt_of(110))
    run(engine, prompt_of(111))  # the first prompt has left the cache
    gate, finish = threading.Event(), TorchCopies.finish_writes

    def late(copies: TorchCopies) -> None:
        assert gate.wait(30)
        finish(copies)

    monkeypatch.setattr(TorchCopies, "finish_writes", late)
    waiting = engine.add_request("waits", prompt_of(100), GREEDY)
    other = engine.add_request("other", prompt_of(20), SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
    for _ in range(400):
        engine.step()
        if other.is_finished:
            break
    assert other.is_finished
    assert not waiting.sequences[0].output_token_ids
    gate.set()
    drain(engine, 100_000)
    assert list(waiting.sequences[0].output_token_ids) == expected
    assert waiting.metrics.num_cached_tokens == 96
    end(engine)


@pytest.mark.parametrize("moment", ["reading", "arrived"])
def test_a_request_that_is_aborted_leaves_its_places(
    new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    engine = with_tiers(new_engine, num_blocks=70, tiers=TierSettings(memory_bytes=32 << 20))
    for length in (100, 110, 111):
        run(engine, prompt_of(length))
    gate, finish = threading.Event(), TorchCopies.finish_writes
    monkeypatch.setattr(TorchCopies, "finish_writes", lambda copies: (gate.wait(30), finish(copies)))
    engine.add_request("aborted", prompt_of(100), GREEDY)
    engine.step()
    assert engine.tiers.has_tickets
    if moment == "arrived":
        gate.set()
    engine.abort("aborted")
    gate.set()
    drain(engine, 100_000)
    assert not engine.tiers.has_tickets
    assert engine.blocks.num_used_blocks == 0
    assert run(engine, prompt_of(100))[1] in (0, 96)
    end(engine)


def test_a_device_without_room_computes_the_prompt(new_engine: NewEngine) -> None:
    """Running sequences keep their blocks: a prompt takes the free ones for its landing, or computes."""
    engine = with_tiers(new_engine, num_blocks=60, tiers=TierSettings(memory_bytes=32 << 20))
    plain = new_engine(num_blocks=400)
    for length in (100, 110, 111):
        run(engine, prompt_of(length))
    long = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    requests = [engine.add_request(str(length), prompt_of(length), long) for length in (60, 100, 110, 111)]
    drain(engine, 100_000)
    for length, request in zip((60, 100, 110, 111), requests, strict=True):
        found = list(request.sequences[0].output_token_ids)
        assert found
        assert found == run(plain, prompt_of(length), long)[0][: len(found)]
    end(engine)


def test_a_device_without_memory_for_a_copy_drops_the_block(
    new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = with_tiers(new_engine, num_blocks=48, tiers=TierSettings(memory_bytes=32 << 20))

    def full(copies: TorchCopies, num_bytes: int) -> Any:
        raise MemoryError

    monkeypatch.setattr(TorchCopies, "_room", full)
    for length in LENGTHS:
        run(engine, prompt_of(length))
    monkeypatch.undo()
    expected, num_cached = run(engine, prompt_of(97))
    assert num_cached < 90
    assert expected == run(new_engine(num_blocks=400), prompt_of(97))[0]
    end(engine)


def test_a_life_at_random_with_tiers(new_engine: NewEngine) -> None:
    """The machine of the CPU's tiers: processes that end between two steps, damaged files, a small cache."""

    class Machine(TierMachine):
        solo = staticmethod(EngineMachine.solo)

        def new_engine(self, **options: Any) -> Any:  # type: ignore[override]
            return new_with_folder(self, new_engine, options)

        def own_tables(self) -> set[int]:
            """Landings hold tables of their own."""
            return (
                {each for each in self.engine.blocks.sequence_ids() if each < 0}
                if self.engine.tiers.has_tickets
                else set()
            )

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=10,
            stateful_step_count=20,
            deadline=None,
            derandomize=True,
            phases=(Phase.generate,),
            suppress_health_check=list(HealthCheck),
        ),
    )


def new_with_folder(machine: TierMachine, new_engine: NewEngine, options: dict[str, Any]) -> Any:
    from helpers import fresh_folder

    if not hasattr(machine, "folder"):
        machine.folder = fresh_folder("gpu-tier-machine")
        machine.sizes = dict(options)
    options["enable_prefix_caching"] = True
    return with_tiers(new_engine, **options, tiers=TierSettings(memory_bytes=20_000, folder=machine.folder))


def test_llm_with_host_memory_and_files(device: str, tmp_path: Path) -> None:
    """The front door, a draft head included: its entries are computed again."""
    from bifolio.config import SpeculativeConfig

    kernels = {"device": device} if device != "cpu" else {"kernels": "torch"}
    options: dict[str, Any] = {"block_size": BLOCK, "max_model_len": 128, "num_blocks": 90, "dtype": "f32", **kernels}
    speculative = SpeculativeConfig("eagle", length=3, draft_model=str(eagle_folder()), adaptive=False)
    prompt = {"prompt_token_ids": prompt_of(60)}
    found = []
    for extra in ({}, {"speculative": speculative}):
        for folder in (None, tmp_path / str(len(extra)), tmp_path / str(len(extra))):
            tiers = {} if folder is None else {"kv_offload": "16MB", "kv_offload_dir": folder}
            with LLM(tiny_folder(), **options, **extra, **tiers) as llm:
                output = llm.generate(prompt, GREEDY)[0]
                found.append((output.outputs[0].token_ids, output.num_cached_tokens))
    assert len({tuple(tokens) for tokens, _ in found}) == 1
    assert [count for _, count in found] == [0, 0, 56, 0, 0, 56]


def test_slots_of_pinned_memory_return_with_the_last_array(device: str) -> None:
    pool = PinnedPool(100, 250, pinned=device.startswith("cuda"))
    taken = [pool.take() for _ in range(4)]
    assert [slot is None for slot in taken] == [False, False, False, True]
    addresses = {slot.ctypes.data for slot in taken if slot is not None}
    assert len(addresses) == 3
    for number, slot in enumerate(taken[:3]):
        assert slot is not None
        slot[:] = number
    assert [int(slot[99]) for slot in taken[:3] if slot is not None] == [0, 1, 2]
    view = taken[1][10:20].reshape(2, 5)  # type: ignore[index]
    taken[0] = taken[1] = None
    del slot
    gc.collect()
    assert len(pool) == 1  # the view holds the second slot
    del view
    gc.collect()
    assert len(pool) == 2


def test_copies_keep_their_order_with_the_passes(new_engine: NewEngine) -> None:
    """A block that is overwritten behind its copy: the copy has the old bytes, however late it is read."""
    storage = new_engine(num_blocks=64).runner.storage
    copies = storage.new_copies(1 << 20)
    rng = np.random.default_rng(0)
    blocks = [rng.integers(0, 100, storage.layout.bytes_per_block).astype(np.uint8) for _ in range(8)]
    for number, block in enumerate(blocks, start=1):
        storage.write_block(number, block)
    reads = [copies.read_block(number) for number in range(1, 9)]
    storage.poison_blocks(range(1, 9))
    assert [read.wait().tobytes() for read in reads] == [block.tobytes() for block in blocks]
    copies.write_blocks([8, 1, 3], [read.wait() for read in reads[:3]], copies.mark())
    copies.finish_writes()
    assert [storage.read_block(place).tobytes() for place in (8, 1, 3)] == [block.tobytes() for block in blocks[:3]]
