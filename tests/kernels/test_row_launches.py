"""Division of one row's products among thread blocks, and the launches of the kernels for one row."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib import resources
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

from bifolio.cache.storage import CacheLayout, KVStorage
from bifolio.kernels.cuda import nvrtc
from bifolio.kernels.cuda.row_attention import RawHeads, can_attend, can_fuse, group_of, row_attention
from bifolio.kernels.cuda.row_experts import can_mix, mix_row, plans_of
from bifolio.kernels.cuda.row_product import (
    AIDES,
    HELPERS,
    SHARED_BYTES,
    TENSOR_DEPTH,
    WARPS,
    RowChange,
    can_multiply,
    plan_of,
    row_product,
)
from bifolio.kernels.interface import AttentionShape, Norm, Rotation, Routing
from bifolio.kernels.triton.row_layouts import EXPONENTS, pack
from exotic_weights import exotic_tensor

SHAPE = AttentionShape(0, 8, 2, 64, 0.125)


# -- plans -------------------------------------------------------------------------------------------------------------
@given(st.integers(1, 40000), st.integers(1, 2100), st.booleans(), st.integers(1, 200))
def test_a_plan_covers_every_row_once_and_fits(count: int, eighths: int, gated: bool, processors: int) -> None:
    rows, depth = count * (2 if gated else 1), eighths * 8
    plan = plan_of(rows, depth, gated=gated, num_processors=processors)
    if plan is None:
        sums = (-(-rows // processors) + 16) * WARPS * 4  # of a thread block, which must fit beside a unit
        assert depth > 16384 or sums + 16 * (depth * 2 + 64) > SHARED_BYTES
        return
    assert plan.unit * plan.units == rows
    assert plan.grid <= min(processors, plan.units)
    assert 1 <= plan.stages <= -(-plan.units // plan.grid)
    assert plan.shared_bytes <= SHARED_BYTES
    assert not gated or plan.unit % 2 == 0
    assert plan.unit in ((8, 16) if plan.by_tensor else (1, 2, 4, 8))
    assert not plan.by_tensor or (depth <= TENSOR_DEPTH and depth % 32 == 0)


def test_small_products_are_in_flight_as_a_whole_and_busy_multiprocessors() -> None:
    for rows, depth, gated in ((4096, 1024, False), (1024, 2048, False), (6144, 1024, True), (1024, 3072, False)):
        plan = plan_of(rows, depth, gated=gated, num_processors=132)
        assert plan is not None
        count = -(-plan.units // plan.grid)
        assert plan.stages == count
        assert plan.units / (count * 132) > 0.96


def test_columns_that_are_no_multiple_of_eight_have_no_plan() -> None:
    assert plan_of(64, 100, gated=False, num_processors=132) is None


@given(st.integers(1, 300), st.integers(1, 600), st.integers(1, 40), st.integers(1, 200))
def test_both_products_of_experts_fit_on_a_multiprocessor(
    width: int, eighths: int, top_k: int, processors: int
) -> None:
    hidden, depth = width * 8, eighths * 8
    plans = plans_of(hidden, depth, top_k, processors)
    if plans is None:
        return
    up, down = plans
    assert top_k <= 32
    assert up.unit * up.units == 2 * hidden * top_k
    assert 2 * hidden % up.unit == 0  # a unit belongs to one expert
    assert down.unit * down.units == depth
    assert not down.by_tensor
    assert up.shared_bytes <= SHARED_BYTES
    assert down.shared_bytes <= SHARED_BYTES


def test_experts_of_common_sizes_have_plans() -> None:
    for hidden, depth, top_k in ((512, 2048, 11), (768, 2048, 8), (512, 2048, 9), (1408, 2048, 8), (1536, 4096, 8)):
        plans = plans_of(hidden, depth, top_k, 132)
        assert plans is not None
        assert sum(plan.shared_bytes for plan in plans) <= SHARED_BYTES
        assert all(plan.stages >= 2 for plan in plans)


# -- launches ----------------------------------------------------------------------------------------------------------
class Recorder:
    """Stands for a compiled module: keeps the constants and the launch."""

    def __init__(self) -> None:
        self.constants: dict[str, int] = {}
        self.all_constants: list[dict[str, int]] = []  # of all launches
        self.parts: tuple[str, ...] = ()
        self.grid: tuple[int, ...] = ()
        self.block = self.shared_bytes = 0
        self.arguments: tuple[Any, ...] = ()

    def load_source(self, parts: tuple[str, ...], _device: int, **constants: int) -> Recorder:
        self.parts, self.constants = parts, constants
        self.all_constants.append(constants)
        return self

    def function(self, name: str) -> Recorder:
        assert name == self.parts[-1]
        return self

    def launch(self, grid: Any, block: int, arguments: Any, *, shared_bytes: int, pdl: bool) -> None:
        assert pdl
        self.grid, self.block, self.arguments, self.shared_bytes = tuple(grid), block, tuple(arguments), shared_bytes

    @staticmethod
    def source(parts: tuple[str, ...]) -> str:
        folder = resources.files("bifolio.kernels.cuda")
        return "".join(folder.joinpath(f"{part}.cu").read_text("utf-8") for part in parts)

    def check(self) -> None:
        """The sources use all constants, and the arguments have the types of the parameters."""
        every, text = (re.sub(r"//.*", "", self.source(parts)) for parts in (self.parts, self.parts[-1:]))
        assert all(re.search(rf"\b{name}\b", every) for name in self.constants)
        found = re.search(rf"\b{self.parts[-1]}\(([^)]*)\)", text)
        assert found is not None
        types = ["pointer" if "*" in each else each.split()[0] for each in found[1].split(",")]
        names = {torch.Tensor: "pointer", int: "int", float: "float"}
        assert [names[type(value)] for value in self.arguments] == types


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    found = Recorder()
    monkeypatch.setattr(nvrtc, "load_source", found.load_source)
    monkeypatch.setattr(nvrtc, "works", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return found


@pytest.mark.parametrize(("rows", "depth", "gated"), [(4096, 1024, False), (1024, 512, True), (96, 4096, False)])
def test_the_launch_of_a_product(rows: int, depth: int, gated: bool, recorder: Recorder) -> None:
    x, weight = torch.zeros(1, depth), torch.zeros(rows, depth, dtype=torch.bfloat16)
    norm, outputs = Norm(torch.ones(depth, dtype=torch.bfloat16), None, 1e-6), rows // 2 if gated else rows
    out = row_product(
        x, weight, norm=norm, bias=torch.zeros(rows), residual=None, activation=0 if gated else -1,
        out_dtype=torch.bfloat16, num_processors=16,
    )  # fmt: skip
    assert out.shape == (1, outputs)
    recorder.check()
    plan = plan_of(rows, depth, gated=gated, num_processors=16)
    assert plan is not None
    assert recorder.grid == (plan.grid,)
    assert recorder.block == 32 * (WARPS + 1)
    own = recorder.constants
    assert (own["IS_NORMED"], own["IS_SCALE_WIDE"], own["IS_X_WIDE"], own["IS_OUT_WIDE"]) == (True, False, True, False)
    assert (own["HAS_BIAS"], own["IS_BIAS_WIDE"], own["HAS_RESIDUAL"], own["IS_FIRST"]) == (True, True, False, False)


def test_the_launch_of_a_product_with_codes(recorder: Recorder) -> None:
    weight = pack((exotic_tensor("Q6_K", 96, 4096),), "cpu")
    options: dict[str, Any] = {"norm": None, "residual": torch.zeros(1, 96), "num_processors": 2}
    codes = weight.constants()
    x = torch.zeros(1, 4096, dtype=torch.bfloat16)
    assert can_multiply(x, weight.rows, gated=False, codes=codes, **options)
    assert not can_multiply(x, weight.rows, gated=False, codes={**codes, "SCALES": EXPONENTS}, **options)
    row_product(x, weight.rows, bias=None, activation=-1, out_dtype=torch.float32, codes=codes, **options)
    recorder.check()
    own = recorder.constants
    assert (own["CODE_BYTES"], own["LOW"], own["HIGH"], own["GROUP"]) == (weight.rows.shape[1], 4, 2, 16)
    assert (own["UNIT"], own["BY_TENSOR"], recorder.grid) == (8, False, (2,))


def test_the_launch_of_a_product_with_an_adapter(recorder: Recorder) -> None:
    x, weight = torch.zeros(1, 4096), torch.zeros(28672, 4096, dtype=torch.bfloat16)
    integers = torch.zeros(16, dtype=torch.int32)
    change = RowChange(weight, torch.zeros(3, 7, 4, dtype=torch.int64), integers, integers, 4, 2, 16)
    options: dict[str, Any] = {"norm": None, "residual": None, "num_processors": 132, "change": change}
    assert can_multiply(x, weight, gated=True, **options)
    row_product(x, weight, bias=None, activation=0, out_dtype=torch.bfloat16, **options)
    recorder.check()
    assert recorder.block == 32 * (WARPS + 1 + AIDES)
    assert (recorder.constants["THIN_WIDTH"], recorder.constants["THIN_PARTS"]) == (16, 2)
    assert recorder.arguments[-3:] == (4, 7, HELPERS)
    plain = plan_of(28672, 4096, gated=True, num_processors=132)
    assert plain is not None
    count = -(-plain.units // plain.grid)
    assert recorder.shared_bytes == plain.shared_bytes + 4 * (2 * count * plain.unit + 32)
    assert not can_multiply(x, weight, gated=True, **{**options, "change": replace(change, base=weight.float())})


def test_operands_that_the_product_does_not_know(recorder: Recorder) -> None:
    x, weight = torch.zeros(1, 64), torch.zeros(32, 64, dtype=torch.bfloat16)
    norm = Norm(torch.ones(64), None, 1e-6)

    def can(x: Any = x, weight: Any = weight, norm: Norm | None = norm, residual: Any = None) -> bool:
        return can_multiply(x, weight, norm=norm, residual=residual, gated=False, num_processors=132)

    assert can()
    assert not can(weight=weight.float())
    assert not can(weight=torch.zeros(64, 32, dtype=torch.bfloat16).T)
    assert not can(x=x.half())
    assert not can(x=x.to(torch.bfloat16))  # a norm of a stream that is not f32
    assert can(x=x.to(torch.bfloat16), norm=None)
    assert can(residual=x.to(torch.bfloat16))
    assert not can(residual=x.half())


def test_the_launches_of_experts(recorder: Recorder) -> None:
    x, residual, out = torch.zeros(1, 256), torch.zeros(1, 256), torch.zeros(1, 256)
    up, down = torch.zeros(6 * 2 * 64, 256, dtype=torch.bfloat16), torch.zeros(6 * 256, 64, dtype=torch.bfloat16)
    routing = Routing(torch.zeros((1, 3), dtype=torch.int32), torch.zeros(1, 3))
    norm = Norm(torch.ones(256, dtype=torch.bfloat16), None, 1e-6)
    options: dict[str, Any] = {"norm": norm, "residual": residual, "num_processors": 16}
    assert can_mix(x, up, down, 3, **options)
    assert not can_mix(x, up.float(), down, 3, **options)
    assert not can_mix(x, up, down, 33, **options)
    assert not can_mix(torch.zeros(2, 256), up, down, 3, **options)
    mix_row(x, routing, up, down, out, activation=0, **options)
    recorder.check()
    up_constants, down_constants = recorder.all_constants
    assert (up_constants["CHOICES"], up_constants["DEPTH"], up_constants["IS_FIRST"]) == (3, 256, True)
    assert (down_constants["CHOICES"], down_constants["DEPTH"], down_constants["BY_TENSOR"]) == (3, 3 * 64, False)
    assert (down_constants["HAS_RESIDUAL"], down_constants["IS_FIRST"]) == (True, False)


@pytest.mark.parametrize("is_raw", [False, True])
def test_the_launch_of_attention(is_raw: bool, recorder: Recorder) -> None:
    storage = KVStorage(CacheLayout(1, 4, 16, 2, 64, "bf16"), device="cpu", backend="torch")
    integers = torch.zeros(4, dtype=torch.int32)
    rotation = Rotation(torch.zeros(2, 16), torch.zeros(2, 16))
    norm = Norm(torch.ones(64, dtype=torch.bfloat16), None, 1e-6)
    shape = replace(SHAPE, query_norm=norm, key_norm=norm)
    qkv = torch.zeros(2, 12 * 64, dtype=torch.bfloat16)
    heads = RawHeads(qkv, rotation) if is_raw else qkv[:, : 8 * 64].view(2, 8, 64)
    out = row_attention(heads, shape, storage, integers.view(2, 2), integers, integers)
    assert out.shape == (2, 8 * 64)
    recorder.check()
    assert recorder.grid == (8, 2, 2)
    own = recorder.constants
    assert (own["DIM"], own["GROUP"], own["SETS"], own["BLOCK_SIZE"]) == (64, 4, 1, 16)
    assert (own["IS_FUSED"], own["HAS_NORM"], own["ROTARY"]) == (is_raw, is_raw, 32 if is_raw else 0)
    teams = own["WARPS"] * 32 // (64 // 8)
    assert recorder.shared_bytes == teams * 4 * 64 * 4  # f32 of each team and query head


def test_query_heads_are_divided_into_sets_that_fit_into_registers() -> None:
    sizes = {heads: group_of(replace(SHAPE, num_heads=heads, num_kv_heads=1)) for heads in (1, 2, 3, 4, 5, 6, 7, 8, 12)}
    assert sizes == {1: 1, 2: 2, 3: 3, 4: 4, 5: 1, 6: 3, 7: 1, 8: 4, 12: 4}


def test_attention_that_the_kernel_does_not_know(recorder: Recorder) -> None:
    bf16 = torch.bfloat16
    assert can_attend(SHAPE, bf16, bf16)
    for change in (
        {"window": 100}, {"softcap": 30.0}, {"sinks": torch.zeros(8)}, {"temperature": 0.1}, {"head_dim": 96},
        {"num_heads": 14},
    ):  # fmt: skip
        assert not can_attend(replace(SHAPE, **change), bf16, bf16), change
    assert not can_attend(SHAPE, bf16, torch.float32)
    assert not can_attend(SHAPE, torch.float16, bf16)


def test_heads_that_attention_does_not_turn_itself() -> None:
    storage: Any = SimpleNamespace(layout=SimpleNamespace(shared_values=False))
    rotation, partial, odd = (Rotation(torch.zeros(1, half), torch.zeros(1, half)) for half in (32, 16, 12))
    norm, wide = Norm(torch.ones(64), None, 1e-6), Norm(torch.ones(8 * 64), None, 1e-6)
    assert can_fuse(SHAPE, rotation, storage)
    assert can_fuse(SHAPE, None, storage)
    assert can_fuse(replace(SHAPE, query_norm=norm, key_norm=norm), rotation, storage)
    assert can_fuse(SHAPE, partial, storage)
    assert not can_fuse(SHAPE, odd, storage)
    for change in (
        {"rope_interleaved": True}, {"value_norm": norm}, {"queries_only": True}, {"query_norm": norm},
        {"query_norm": wide, "key_norm": norm}, {"query_norm": norm, "key_norm": replace(norm, centered=True)},
        {"query_norm": norm, "key_norm": norm, "norm_after_rope": True},
    ):  # fmt: skip
        assert not can_fuse(replace(SHAPE, **change), rotation, storage), change
    assert not can_fuse(SHAPE, rotation, SimpleNamespace(layout=SimpleNamespace(shared_values=True)))  # type: ignore[arg-type]
