"""Launches of CUDA kernels for experts in MXFP4 pass the arguments that the sources declare; nothing is computed."""

from __future__ import annotations

import importlib.util
import re
from importlib import resources
from typing import Any

import numpy as np
import pytest

if importlib.util.find_spec("torch") is None or importlib.util.find_spec("triton") is None:
    pytest.skip("torch or triton is not installed", allow_module_level=True)

import torch
from test_mxfp4_fragments import random_blocks, tensor_of

from bifolio.kernels.cuda.mxfp4_fragments import FragmentStack
from bifolio.kernels.interface import Experts, Linear, Routing
from bifolio.kernels.torch_reference import TorchKernels
from bifolio.kernels.triton import expert_fragments, experts
from bifolio.kernels.triton.expert_order import Tiles

COUNT, TOP_K, DEPTH, WIDTH = 4, 3, 96, 64


class Recorder:
    """A module whose kernels note their launches."""

    def __init__(self) -> None:
        self.launches: dict[str, tuple[tuple[int, ...], int, tuple[Any, ...], int]] = {}

    def function(self, name: str) -> Any:
        recorder = self

        class Function:
            def launch(self, grid: Any, block: int, arguments: Any, *, shared_bytes: int, pdl: bool) -> None:
                assert pdl
                recorder.launches[name] = (tuple(grid), block, tuple(arguments), shared_bytes)

        return Function()


def parameters(name: str) -> list[str]:
    """Types of the parameters of a kernel: pointers or int."""
    folder = resources.files("bifolio.kernels.cuda")
    source = "".join(folder.joinpath(f"mxfp4_{part}.cu").read_text("utf-8") for part in ("few", "grouped"))
    found = re.search(rf"\b{name}\(([^)]*)\)", source)
    assert found is not None
    text = found[1]
    if text == "PARAMETERS":
        macro = re.search(r"#define PARAMETERS((?:.*\\\n)+.*)\n", source)
        assert macro is not None
        text = macro[1].replace("\\\n", " ")
    return ["pointer" if "*" in each else each.split()[0] for each in text.split(",")]


def mixture(bias: bool) -> Experts:
    def linear(rows: int, columns: int, parts: int, seed: int) -> Linear:
        biases = tuple(np.full(rows, 0.5 + part, np.float32) if bias else None for part in range(parts))
        return Linear(tuple(tensor_of(random_blocks(rows, columns, seed + part)) for part in range(parts)), biases)

    up = tuple(linear(WIDTH, DEPTH, 2, 2 * number) for number in range(COUNT))
    return Experts(up, tuple(linear(DEPTH, WIDTH, 1, 50 + number) for number in range(COUNT)), "swiglu_clamped")


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    found = Recorder()
    monkeypatch.setattr(experts, "can_mix_fragments", lambda *_: True)
    monkeypatch.setattr(expert_fragments, "few_kernels", lambda: found)
    monkeypatch.setattr(expert_fragments, "grouped_kernels", lambda: found)

    def cut(chosen: torch.Tensor, num_experts: int, rows: int) -> Tiles:
        integers = torch.zeros(chosen.numel(), dtype=torch.int32)
        return Tiles(integers, integers[:5], integers[:5], integers[:5], rows)

    monkeypatch.setattr(expert_fragments, "cut_pairs", cut)
    monkeypatch.setattr(expert_fragments, "sum_kernel", Ignored())
    return found


class Ignored:
    """A Triton kernel that is not launched."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments, **options: None


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("tokens", "names"), [(1, ("few_up", "few_down")), (40, ("grouped_up", "grouped_down"))])
def test_arguments_are_those_of_the_sources(
    recorder: Recorder, tokens: int, names: tuple[str, ...], bias: bool
) -> None:
    prepared = experts.prepare_stacks(mixture(bias), TorchKernels("cpu", "bf16"))
    assert all(isinstance(stack, FragmentStack) for stack in prepared)
    assert [None if stack.bias is None else stack.bias.numel() for stack in prepared] == (
        [2 * COUNT * WIDTH, COUNT * DEPTH] if bias else [None, None]
    )
    routing = Routing(torch.zeros((tokens, TOP_K), dtype=torch.int32), torch.ones((tokens, TOP_K)))
    x, residual = torch.zeros((tokens, DEPTH), dtype=torch.bfloat16), torch.zeros((tokens, DEPTH))
    out = experts.mixed(
        x, routing, Experts((), (), "swiglu_clamped", prepared=prepared), torch.bfloat16, residual=residual
    )
    assert (out.dtype, out.shape) == (torch.float32, (tokens, DEPTH))
    assert set(recorder.launches) == set(names)
    for name in names:
        _, block, arguments, shared_bytes = recorder.launches[name]
        kinds = ["pointer" if isinstance(each, torch.Tensor) else type(each).__name__ for each in arguments]
        assert kinds == parameters(name), name
        assert block % 32 == 0
        assert block <= 512
        assert 0 < shared_bytes <= 227 * 1024


def test_every_row_has_a_thread_block(recorder: Recorder) -> None:
    up, down = experts.prepare_stacks(mixture(False), TorchKernels("cpu", "bf16"))
    assert isinstance(up, FragmentStack)
    assert isinstance(down, FragmentStack)
    together = Experts((), (), "silu", prepared=(up, down))
    for tokens, names in ((2, ("few_up", "few_down")), (30, ("grouped_up", "grouped_down"))):
        routing = Routing(torch.zeros((tokens, TOP_K), dtype=torch.int32), torch.ones((tokens, TOP_K)))
        expert_fragments.mix_fragments(torch.zeros((tokens, DEPTH), dtype=torch.bfloat16), routing, together)
        first, second = (recorder.launches[name][0] for name in names)
        if tokens == 2:
            assert first[0] * expert_fragments.UP_TILES * 16 >= 2 * WIDTH
            assert first[1] == tokens * TOP_K
            assert (second[0] * 16 >= DEPTH, second[1]) == (True, tokens)
        else:
            assert first[0] * expert_fragments.WARPGROUPS * expert_fragments.GROUPS * 64 >= 2 * WIDTH
            assert second[0] * expert_fragments.WARPGROUPS * expert_fragments.GROUPS * 64 >= DEPTH


def test_other_formats_stay_with_triton(recorder: Recorder) -> None:
    """One matrix in another format, or experts without gates: no fragments."""
    given = mixture(False)
    dense = Linear((np.zeros((DEPTH, WIDTH), np.float32),), (None,))
    mixed = Experts(given.up, (*given.down[:-1], dense), "silu")
    assert not any(
        isinstance(each, FragmentStack) for each in experts.prepare_stacks(mixed, TorchKernels("cpu", "bf16"))
    )
    halves = tuple(Linear(linear.parts[:1], linear.biases[:1]) for linear in given.up)
    plain = Experts(halves, given.down, "relu2", gated=False)
    assert not any(
        isinstance(each, FragmentStack) for each in experts.prepare_stacks(plain, TorchKernels("cpu", "bf16"))
    )
