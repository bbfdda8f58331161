"""Low-rank adapters on the Triton kernels, in the interpreter: grouped products, and engines that mix adapters."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent.parent))

from adapter_cases import DEPTH, WIDTHS, low_rank, new_adapters
from network_cases import new_linear

from adapter_files import adapter_folder, end_folder
from bifolio.engine.engine import InferenceEngine
from bifolio.errors import ConfigError
from bifolio.kernels.interface import Adapter, AdapterUse, ExpertLowRank, ProductShape
from bifolio.kernels.reference import ReferenceKernels
from bifolio.kernels.triton import TritonKernels, adapted_products
from bifolio.kernels.triton.adapter_slots import AdapterSlots, grouped_rows
from bifolio.kernels.triton.step.decodes import StepKey
from bifolio.model.huggingface.hf_loader import load_folder
from bifolio.sampling_params import SamplingParams
from helpers import make_engine, random_prompt, tiny_folder

SIZES: dict[str, Any] = {"num_blocks": 64, "block_size": 4, "max_num_seqs": 4, "token_budget": 24, "chunk_size": 9}


def new_slots(**options: Any) -> AdapterSlots:
    products = {3: ProductShape(WIDTHS, DEPTH), 5: ProductShape((sum(WIDTHS),), DEPTH)}
    options = {"most_in_batch": 4, "most_idle": 2, "fixed": True, **options}
    return AdapterSlots(products, "cpu", torch.float32, **options)


@given(st.lists(st.integers(-1, 4), min_size=1, max_size=80), st.sampled_from((4, 16)))
def test_tiles_hold_each_row_once_beside_rows_of_its_adapter(numbers: list[int], rows: int) -> None:
    order, tiles, groups, members = grouped_rows(np.array(numbers, np.int32), rows)
    seen: list[int] = []
    for adapter, first, count in tiles.T.tolist():
        assert 1 <= count <= rows
        own = order[first : first + count].tolist()
        assert all(numbers[row] == adapter for row in own)
        seen += own
    assert sorted(seen) == list(range(len(numbers)))
    slots = new_slots()
    assert len(slots.words(np.array(numbers, np.int32), 80)) == 80 + 81 + 80 + 3 * slots._num_tiles(80)
    assert sorted(groups[: groups[-1]].tolist()) == sorted({*numbers} - {-1})
    assert [groups[member] if member >= 0 else -1 for member in members] == numbers
    assert tiles.shape[1] <= len(numbers)


@pytest.mark.parametrize("count", [1, 5, 37])
def test_changes_equal_the_reference(count: int) -> None:
    """Of whole products, of parts, of a part twice with a bias, and of another product; rows in any order."""
    rng = np.random.default_rng(count)
    slots, adapters = new_slots(), new_adapters(rng)
    kernels, reference = TritonKernels("cpu", "f32"), ReferenceKernels()
    x = rng.standard_normal((count, DEPTH)).astype(np.float32)
    y = rng.standard_normal((count, sum(WIDTHS))).astype(np.float32)
    rows = rng.integers(-1, 3, count).astype(np.int32)
    use = slots.stage(AdapterUse(tuple(slots.prepare(each) for each in adapters), rows))
    for site in (3, 5):
        found = kernels.to_host(kernels.adapt(torch.tensor(y), torch.tensor(x), site, use))
        expected = reference.adapt(y, x, site, AdapterUse(tuple(adapters), rows))
        np.testing.assert_allclose(found, expected, atol=1e-4, rtol=1e-4)
        assert (found[rows < 0] == y[rows < 0]).all()


FUSED = {3: (128, 128, 256), 5: (192, 192), 6: (80,)}  # widths of products whose kernels add the changes themselves


def changed(kernels: Any, x: Any, linears: dict[int, Any], use: AdapterUse, residual: Any) -> list[np.ndarray]:
    """A product of three parts, gate and up with their activation, and a product that is added to the residual."""
    own = {
        site: kernels.adapt(kernels.linear(x, kernels.prepare_linear(each)), x, site, use)
        for site, each in linears.items()
    }
    results = own[3], kernels.act_mul(own[5], "silu"), kernels.add(residual, own[6])
    return [np.asarray(kernels.to_host(each)) for each in results]


@pytest.mark.parametrize("count", [2, 5, 40])
def test_products_add_the_changes_in_their_kernels(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of adapters of several ranks, with a bias, of some parts, and of more adapters than are multiplied at once."""
    rng = np.random.default_rng(count)
    linears = {
        site: replace(new_linear(rng, widths, DEPTH, bias=site == 5), site=site) for site, widths in FUSED.items()
    }
    adapters = [
        Adapter({site: (low_rank(rng, sum(widths), DEPTH, 3),) for site, widths in FUSED.items()}) for _ in range(9)
    ]
    adapters += [
        Adapter({3: (low_rank(rng, 256, DEPTH, 33, 256, bias=True),), 5: (low_rank(rng, 192, DEPTH, 17, 192),)}),
        Adapter({3: (low_rank(rng, 128, DEPTH, 20),), 6: (low_rank(rng, 80, DEPTH, 16),)}),
    ]  # fmt: skip
    x = rng.standard_normal((count, DEPTH)).astype(np.float32)
    residual = rng.standard_normal((count, 80)).astype(np.float32)
    rows = rng.integers(-1, len(adapters), count).astype(np.int32)
    expected = changed(ReferenceKernels(), x, linears, AdapterUse(tuple(adapters), rows), residual)
    slots = AdapterSlots(
        {site: ProductShape(widths, DEPTH) for site, widths in FUSED.items()}, "cpu", torch.float32,
        most_in_batch=16, most_idle=2, fixed=False,
    )  # fmt: skip
    monkeypatch.setattr(adapted_products, "expand", None)  # is not needed
    use = slots.stage(AdapterUse(tuple(slots.prepare(each) for each in adapters), rows))
    found = changed(TritonKernels("cpu", "f32"), torch.tensor(x), linears, use, torch.tensor(residual))
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-4, rtol=1e-4)


def test_an_adapter_lies_in_front_of_the_first_place_of_the_table() -> None:
    """Places are counted from an array that may have a higher address than the adapters."""
    rng = np.random.default_rng(0)
    slots, adapter = new_slots(), new_adapters(rng)[1]
    prepared = slots.prepare(adapter)
    size = prepared.prepared.values.numel()
    joint = torch.zeros(size + 64)
    joint[:size] = prepared.prepared.values
    slots._base = joint[size:]
    prepared = replace(prepared, prepared=replace(prepared.prepared, values=joint[:size]))
    x = rng.standard_normal((3, DEPTH)).astype(np.float32)
    y, rows = np.zeros((3, sum(WIDTHS)), np.float32), np.array([0, -1, 0], np.int32)
    use = slots.stage(AdapterUse((prepared,), rows))
    found = TritonKernels("cpu", "f32").adapt(torch.tensor(y), torch.tensor(x), 3, use)
    expected = ReferenceKernels().adapt(y, x, 3, AdapterUse((adapter,), rows))
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=1e-4)


def test_adapters_leave_the_device_by_age_and_come_back() -> None:
    rng = np.random.default_rng(0)
    slots = new_slots()
    adapters = [slots.prepare(new_adapters(rng)[0]) for _ in range(5)]
    first = slots.numbers_of(adapters[:2])
    assert len({*first.tolist()}) == 2
    before = slots.version
    assert slots.numbers_of([adapters[1], None, adapters[0]]).tolist() == [first[1], -1, first[0]]
    assert slots.version == before  # nothing was copied
    slots.numbers_of([adapters[2]])  # adapters[1] was used before adapters[0]
    assert set(slots._held) == {adapters[0].prepared, adapters[2].prepared}
    assert len(set(slots.numbers_of(adapters[1:]).tolist())) == 4  # a batch has more than stay
    slots.numbers_of([adapters[0]])
    assert len(slots._held) == 2
    assert adapters[0].prepared in slots._held


def test_adapters_of_experts_are_refused() -> None:
    with pytest.raises(ConfigError, match="adapters of experts do not run on a GPU"):
        new_slots().prepare(Adapter({}, {0: (ExpertLowRank(),)}))


@pytest.mark.parametrize("kind", ["own head", "own table", "head", "table"])
def test_adapters_of_the_head_and_the_embedding_are_refused(kind: str) -> None:
    """Captured steps read no table and no head of an adapter; other adapters go on."""
    base = tiny_folder()
    engine = make_engine(load_folder(base), kernels=TritonKernels("cpu", "f32"), **SIZES)
    with pytest.raises(ConfigError, match="adapters that change the head or the embedding do not run on a GPU"):
        engine.adapters.load("a", end_folder(base, kind))
    assert "a" not in engine.adapters
    assert engine.adapters.load("b", adapter_folder(base)).prepared is not None


def with_adapters(kernels: Any, folder: Path, **options: Any) -> tuple[InferenceEngine, list[Any]]:
    engine = make_engine(load_folder(folder), kernels=kernels, **{**SIZES, **options})
    loaded = [
        engine.adapters.load(f"a{seed}", adapter_folder(folder, rank=rank, seed=seed))
        for seed, rank in enumerate((4, 20, 1))
    ]
    return engine, [None, *loaded]


def run(engine: InferenceEngine, wanted: list[tuple[int, Any]], **options: Any) -> list[Any]:
    """Tokens and logprobs of requests with prompts of these lengths, one more after each step."""
    params = SamplingParams(**{"max_tokens": 3, "ignore_eos": True, "temperature": 0.0, "logprobs": 1, **options})
    requests = []
    for number, (length, adapter) in enumerate(wanted):
        prompt = random_prompt(length, seed=number, vocab_size=61)
        requests.append(engine.add_request(str(number), prompt, params, adapter=adapter))
        engine.step()
    while engine.has_work:
        engine.step()
    assert all(request.error is None for request in requests)
    return [(s.output_token_ids, [e.logprob for e in s.logprobs]) for r in requests for s in r.sequences]


WANTED = ((4, 1), (13, 0), (3, 2), (5, 3))  # tokens of the prompt, adapter


@pytest.mark.parametrize("options", [{}, {"deterministic": True}])
def test_engines_give_what_the_reference_gives(options: dict[str, Any]) -> None:
    folder = tiny_folder()
    engine, loaded = with_adapters(ReferenceKernels(), folder)
    expected = run(engine, [(length, loaded[number]) for length, number in WANTED])
    plain = run(engine, [(length, None) for length, _ in WANTED])
    assert [tokens for tokens, _ in expected] != [tokens for tokens, _ in plain]
    engine, loaded = with_adapters(TritonKernels("cpu", "f32", **options), folder)
    found = run(engine, [(length, loaded[number]) for length, number in WANTED])
    for (ours, scores), (theirs, wanted) in zip(found, expected, strict=True):
        assert ours == theirs
        assert scores == pytest.approx(wanted, abs=1e-3)
    graphs = engine.slots.device.graphs  # type: ignore[union-attr]
    with_adapters_of = {key for key in graphs.keys(StepKey) if key.adapts is not None}
    assert with_adapters_of
    run(engine, [(4, None)])
    assert {key for key in graphs.keys(StepKey) if key.adapts is not None} == with_adapters_of


def test_a_request_has_the_same_bits_alone_and_beside_other_adapters() -> None:
    """In deterministic mode; the last engine computes every step kernel by kernel."""
    folder = tiny_folder()
    engine, loaded = with_adapters(TritonKernels("cpu", "f32", deterministic=True), folder)
    together = run(engine, [(length, loaded[number]) for length, number in WANTED])
    engine.blocks.drop_cached()
    last = run(engine, [(length, loaded[number]) for length, number in WANTED][:1])
    assert last == together[:1]
    engine.blocks.drop_cached()
    engine.slots.run_on_device = lambda plan, batch, given=None: None  # type: ignore[method-assign]
    assert run(engine, [(length, loaded[number]) for length, number in WANTED][:2]) == together[:2]
