"""Layers of experts of the host pass through a device in turns; streams and events stand in for those of a GPU."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from bifolio.kernels.interface import Experts, Linear
from bifolio.kernels.torch_reference import TorchKernels
from bifolio.kernels.triton import quantised
from bifolio.kernels.triton.expert_stream import ExpertStream
from bifolio.kernels.triton.experts import prepare_stack
from bifolio.quant import QuantFormat
from bifolio.quant.tensor import QuantizedTensor

COUNT = 4


class Event:
    """All work is done when its launch returns."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.at = 0.0

    def record(self, stream: Any = None) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Event) -> float:
        return 1e3 * (other.at - self.at)


class Stream:
    def __init__(self, device: str = "cpu") -> None: ...

    def wait_event(self, event: Event) -> None: ...


@pytest.fixture(autouse=True)
def stand_in_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)


def some_experts(seed: int, format: QuantFormat = QuantFormat.Q8_0) -> Experts:
    rng = np.random.default_rng(seed)

    def linear(out: int, width: int, parts: int) -> Linear:
        values = [rng.normal(size=(out, width)).astype(np.float32) for _ in range(parts)]
        return Linear(tuple(QuantizedTensor.quantize(each, format) for each in values), (None,) * parts)

    return Experts(
        tuple(linear(64, 32, 2) for _ in range(COUNT)), tuple(linear(32, 64, 1) for _ in range(COUNT)), "silu"
    )


def test_every_layer_has_its_own_weights_in_any_order() -> None:
    layers = [some_experts(seed) for seed in range(5)]
    stream = ExpertStream("cpu", lambda: 1e12)
    for experts in layers:
        stream.add(experts)
    assert stream.reserve()
    for number in (0, 1, 2, 3, 4, 0, 1, 4, 2):  # passes begin anew, and some end early
        layer = stream.layer(layers[number])
        assert layer is not None
        own = [quantised.dequantise(stack.weight, torch.float32) for stack in stream.stacks(layer)]
        for ours, linears in zip(own, (layers[number].up, layers[number].down), strict=True):
            theirs = quantised.dequantise(prepare_stack(linears, TorchKernels("cpu")).weight, torch.float32)
            torch.testing.assert_close(ours, theirs, atol=0, rtol=0)


def test_measured_times_choose_the_side() -> None:
    experts = some_experts(0)
    stream = ExpertStream("cpu", lambda: 2e12)
    stream.add(experts)
    layer = stream.layer(experts)
    assert layer is not None
    copy = layer.nbytes / 2e10  # before the first copy
    rows = int(copy * 1e12 / (2 * layer.work))
    assert not stream.is_faster(rows // 2, 2, layer, 0.0)
    assert stream.is_faster(2 * rows, 2, layer, 0.0)
    assert stream.is_faster(rows // 2, 2, layer, 4 * copy / rows)
    assert not stream.is_faster(2 * rows, 2, layer, 0.1 * copy / rows)


def test_weights_that_the_device_would_convert_stay_on_the_host() -> None:
    stream = ExpertStream("cpu", lambda: 1e12)
    for format in (QuantFormat.F32, QuantFormat.BF16):
        experts = some_experts(0, format)
        stream.add(experts)
        assert stream.layer(experts) is None
