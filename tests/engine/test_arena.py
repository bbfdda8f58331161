"""The bookkeeping of an arena: addresses stay, memory comes and goes, and each byte is copied when it must be."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bifolio import LLM, SamplingParams
from bifolio.errors import ConfigError, DeviceMemoryError
from helpers import fresh_folder, tiny_folder, tiny_model

torch = pytest.importorskip("torch")

from bifolio.kernels import arena as arena_module  # noqa: E402
from bifolio.kernels.arena import CACHE, WEIGHTS, Arena, tensors_of  # noqa: E402
from bifolio.kernels.host_pages import HostPages  # noqa: E402
from bifolio.kernels.torch_reference import TorchKernels  # noqa: E402

PARAMS = SamplingParams(temperature=0.8, seed=4, max_tokens=12, ignore_eos=True)
PROMPT: Any = {"prompt_token_ids": [5, 9, 11, 40, 41, 42, 3, 8, 20]}
SIZES = {"block_size": 4, "num_blocks": 64, "max_model_len": 64}


@dataclass(frozen=True, slots=True)
class Tree:
    weight: Any
    parts: tuple[Any, ...]
    others: dict[str, Any]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "CHUNK_BYTES", 2 * HostPages.granularity)


def tree_of(seed: int) -> Tree:
    """A fused matrix and its views, a vector of odd length, and bytes."""
    numbers = torch.Generator().manual_seed(seed)
    weight = torch.randn(96, 70, generator=numbers)
    parts = tuple(torch.split(weight, [32, 64]))
    others = {
        "bias": torch.randn(7, generator=numbers).bfloat16(),
        "rows": torch.randint(0, 9, (3, 5), generator=numbers).to(torch.uint8),
    }
    return Tree(weight, (*parts, weight.t()), others)


def contents(tree: Tree) -> list[Any]:
    return [tensor.clone() for tensor in tensors_of(tree)]


def same(tree: Tree, expected: list[Any]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(tensors_of(tree), expected, strict=True))


def test_tensors_move_once_and_keep_their_values_and_views() -> None:
    pages = HostPages()
    arena, tree = Arena(pages), tree_of(0)
    expected = contents(tree)
    arena.adopt(tree)
    assert same(tree, expected)
    assert tree.parts[1].data_ptr() == tree.weight.data_ptr() + 32 * 70 * 4
    assert tree.parts[2].stride() == (1, 70)
    assert all(tensor.data_ptr() % tensor.element_size() == 0 for tensor in tensors_of(tree))
    before = pages.num_mapped
    arena.adopt((tree, tree))
    assert pages.num_mapped == before == arena.num_bytes(WEIGHTS)


def test_weights_sleep_in_host_memory_and_are_copied_there_once() -> None:
    pages = HostPages()
    arena, tree = Arena(pages), tree_of(0)
    arena.adopt(tree)
    cache = arena.zeros((5, 3), torch.float32)
    assert not cache.any()
    cache.fill_(3)
    expected, places = contents(tree), [tensor.data_ptr() for tensor in (*tensors_of(tree), cache)]
    size = arena.num_bytes(WEIGHTS)
    for turn in range(3):
        arena.sleep(keep_weights=True)
        assert pages.num_mapped == 0
        assert arena.keeps_weights
        assert pages.num_copied == size * (1 + turn)
        arena.wake({CACHE, WEIGHTS})
        assert pages.num_copied == size * (2 + turn)
        assert same(tree, expected)
        assert not cache.any()
        assert places == [tensor.data_ptr() for tensor in (*tensors_of(tree), cache)]


def test_parts_wake_alone_and_twice() -> None:
    pages = HostPages()
    arena, tree = Arena(pages), tree_of(0)
    arena.adopt(tree)
    cache = arena.zeros((5000,), torch.bfloat16)
    expected = contents(tree)
    arena.sleep(keep_weights=True)
    arena.wake({WEIGHTS})
    arena.wake({WEIGHTS})
    assert same(tree, expected)
    assert pages.num_mapped == arena.num_bytes(WEIGHTS)
    arena.sleep(keep_weights=True)
    arena.wake({CACHE})
    assert not cache.any()
    assert pages.num_mapped == arena.num_bytes(CACHE)


def test_new_weights_take_the_place_of_old_ones_and_are_copied_again() -> None:
    pages = HostPages()
    arena, tree, other = Arena(pages), tree_of(0), tree_of(1)
    arena.adopt(tree)
    arena.sleep(keep_weights=True)
    arena.wake({WEIGHTS})
    arena.refill(tree, other)
    arena.sleep(keep_weights=True)
    arena.wake({WEIGHTS})
    assert same(tree, contents(other))
    arena.sleep(keep_weights=False)
    assert not arena.keeps_weights
    arena.wake({WEIGHTS})
    arena.refill(tree, tree_of(0))
    assert same(tree, contents(tree_of(0)))


def test_weights_of_other_shapes_or_finer_types_are_refused() -> None:
    arena, tree = Arena(HostPages()), tree_of(0)
    arena.adopt(tree)
    expected = contents(tree)
    for other in (
        Tree(tree.weight, tree.parts[:2], tree.others),
        Tree(tree.weight[:8], tree.parts, tree.others),
        Tree(tree.weight, tree.parts, {**tree.others, "bias": torch.zeros(7)}),
    ):
        with pytest.raises(ConfigError, match="other formats"):
            arena.refill(tree, other)
    assert same(tree, expected)


def test_a_wake_without_room_leaves_all_asleep_and_can_be_repeated() -> None:
    pages = HostPages()
    arena, tree = Arena(pages), tree_of(0)
    arena.adopt(tree)
    cache = arena.zeros((50_000,), torch.float32)
    expected = contents(tree)
    arena.sleep(keep_weights=True)
    for most in (HostPages.granularity, arena.num_bytes(WEIGHTS) + 3 * HostPages.granularity):
        pages.most = most
        with pytest.raises(DeviceMemoryError, match="no memory"):
            arena.wake({WEIGHTS, CACHE})
        assert pages.num_mapped == 0
    pages.most = None
    arena.wake({WEIGHTS, CACHE})
    assert same(tree, expected)
    assert not cache.any()


def test_a_host_without_memory_keeps_the_engine_awake() -> None:
    class FullHost(HostPages):
        def pin(self, num_bytes: int) -> Any:
            raise DeviceMemoryError("the host is full")

    pages = FullHost()
    arena, tree = Arena(pages), tree_of(0)
    arena.adopt(tree)
    expected, before = contents(tree), pages.num_mapped
    with pytest.raises(DeviceMemoryError, match="full"):
        arena.sleep(keep_weights=True)
    assert pages.num_mapped == before
    assert same(tree, expected)


def test_memory_and_addresses_return_with_the_tensors() -> None:
    pages = HostPages()
    arena, tree = Arena(pages), tree_of(0)
    arena.adopt(tree)
    cache = arena.zeros((5000,), torch.float32)
    view = cache[5:]
    del cache
    gc.collect()
    assert pages.num_mapped == arena.num_bytes(WEIGHTS) + arena.num_bytes(CACHE)
    del view
    gc.collect()
    assert arena.num_bytes(CACHE) == 0
    arena.sleep(keep_weights=True)
    del tree, arena
    gc.collect()
    assert pages.num_mapped == 0
    assert not pages._ranges


# -- an engine over it -------------------------------------------------------------------------------------------------
def arena_llm(folder: Path | str, **options: Any) -> tuple[LLM, HostPages]:
    kernels, pages = TorchKernels("cpu", "f32"), HostPages()
    kernels.arena = Arena(pages)
    return LLM(str(folder), kernels=kernels, **{**SIZES, **options}), pages


def tokens(llm: LLM) -> list[int]:
    return llm.generate(PROMPT, PARAMS)[0].outputs[0].token_ids


@pytest.mark.parametrize("name", ["dense", "qwen3moe", "lfm2"])
@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_sleeps_and_answers_as_before(name: str, level: int) -> None:
    folder = tiny_folder(fresh_folder("sleep")) if name == "dense" else tiny_model(name, vocab_size=61)[1]
    llm, pages = arena_llm(folder)
    expected, size = tokens(llm), pages.num_mapped
    branch = llm.open(PROMPT)
    for _ in range(2):
        llm.sleep(level)
        assert pages.num_mapped == 0
        assert llm.is_sleeping()
        llm.wake_up(tags=["weights"])
        assert llm.is_sleeping()
        llm.wake_up()
        assert pages.num_mapped == size
        assert tokens(llm) == expected
    assert branch.generate(PARAMS).outputs[0].token_ids == expected
    llm.engine.blocks.check_invariants()
    llm.close()
    del llm, branch
    gc.collect()
    assert pages.num_mapped == 0


def test_new_weights_of_an_engine_that_is_awake_or_asleep() -> None:
    old, new = tiny_folder(fresh_folder("sleep")), tiny_folder(fresh_folder("sleep"), seed=1)
    llm, pages = arena_llm(old)
    plain, _ = arena_llm(new)
    first, second = tokens(llm), tokens(plain)
    assert first != second
    assert llm.load_weights(new) == 1
    assert tokens(llm) == second
    llm.sleep()
    llm.wake_up()
    assert tokens(llm) == second
    llm.sleep(level=2)
    llm.load_weights(old)
    assert llm.is_sleeping()
    llm.wake_up()
    assert tokens(llm) == first
    llm.sleep(level=2)
    llm.wake_up()
    assert tokens(llm) == first
    assert pages.num_mapped


def test_two_engines_take_turns_on_memory_for_one() -> None:
    pages, folders = HostPages(), [tiny_folder(fresh_folder("sleep"), seed=seed) for seed in (0, 1)]
    expected = [tokens(arena_llm(folder)[0]) for folder in folders]
    engines = []
    for folder in folders:
        kernels = TorchKernels("cpu", "f32")
        kernels.arena = Arena(pages)
        engines.append(LLM(str(folder), kernels=kernels, **SIZES))
        pages.most = pages.most or pages.num_mapped
        engines[-1].sleep()
    for turn in range(4):
        engines[turn % 2].wake_up()
        assert tokens(engines[turn % 2]) == expected[turn % 2]
        with pytest.raises(DeviceMemoryError, match="no memory"):
            engines[1 - turn % 2].wake_up()
        engines[turn % 2].sleep()


def test_storages_of_moved_weights_are_freed() -> None:
    """Views keep the tensor they were cut from, which the structure itself may not have."""
    import weakref

    arena, base = Arena(HostPages()), torch.zeros(64, 8)
    old = weakref.ref(base.untyped_storage())
    tree = Tree(base.view(8, 64)[2:], (), {})
    address = base.data_ptr()
    del base
    arena.adopt(tree)
    assert tree.weight._base is None or tree.weight._base.data_ptr() != address
    gc.collect()
    assert old() is None
