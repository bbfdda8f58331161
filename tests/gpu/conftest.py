"""Tests on a GPU: `pytest tests/gpu --device cuda`. They need numpy, torch, triton, transformers and hypothesis alone.

Many are tests of the CPU's engine that are imported here and find the GPU's kernels under the same fixture. To see that
the tests themselves are right, they run on the CPU too: with `--device torch` on torch's kernels, and those that are
small enough with `TRITON_INTERPRET=1` and `--device interpret` on the GPU's own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import pytest

for folder in ("", "engine", "sampling", "model", "api", "kernels"):
    sys.path.insert(0, str(Path(__file__).parent.parent / folder))


class MakeKernels(Protocol):
    def __call__(self, dtype: str = "f32", *, deterministic: bool = False) -> Any: ...


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """The torch device; without one the tests of this folder are skipped."""
    wanted = str(request.config.getoption("--device"))
    if wanted == "cpu":
        pytest.skip("runs on a GPU: pass --device cuda")
    torch = pytest.importorskip("torch")
    if wanted in ("interpret", "torch"):
        return "cpu"
    pytest.importorskip("triton")
    if not torch.cuda.is_available():
        pytest.fail(f"--device {wanted}: torch sees no GPU")
    return wanted


@pytest.fixture(scope="session")
def gpu_kernels(device: str, request: pytest.FixtureRequest) -> MakeKernels:
    """Kernel sets of a type; float32 unless told, so that results can be held against the CPU's."""

    def make(dtype: str = "f32", *, deterministic: bool = False) -> Any:
        if request.config.getoption("--device") == "torch":
            from bifolio.kernels.torch_reference import TorchKernels

            return TorchKernels(device, dtype)
        from bifolio.kernels.triton import TritonKernels

        return TritonKernels(device, dtype, deterministic=deterministic)

    return make


@pytest.fixture
def own_kernels(device: str, request: pytest.FixtureRequest) -> None:
    """For tests of what the GPU's kernels alone promise."""
    if request.config.getoption("--device") == "torch":
        pytest.skip("needs the GPU's own kernels")


@pytest.fixture(scope="session")
def new_kernels(gpu_kernels: MakeKernels) -> Callable[[], Any]:
    """What the tests that are imported from elsewhere run on."""
    return gpu_kernels


@pytest.fixture(scope="session")
def new_engine(gpu_kernels: MakeKernels) -> Callable[..., Any]:
    """A small engine whose steps are captured and overlap; options as those of `helpers.make_engine`."""

    def make(dtype: str = "f32", *, deterministic: bool = False, **options: Any) -> Any:
        from helpers import make_engine

        options.pop("kernels", None)
        kernels = gpu_kernels(dtype, deterministic=deterministic)
        return make_engine(kernels=kernels, cache_dtype=dtype, **options)  # type: ignore[arg-type]

    return make
