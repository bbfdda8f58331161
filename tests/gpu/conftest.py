"""Tests on a GPU: `pytest tests/gpu --device cuda`. They need numpy, torch, triton, transformers and hypothesis alone.

Many are tests of the CPU's engine that are imported here and find the GPU's kernels under the same fixture. To see that
the tests themselves are right, they run on the CPU too: with `--device torch` on torch's kernels, and those that are
small enough with `TRITON_INTERPRET=1` and `--device interpret` on the GPU's own.

Most of the time is the compilation of kernels: `scripts/gpu-tests` runs the parts of `--shard` in several processes.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

for folder in ("", "engine", "sampling", "model", "api", "kernels", "laws", "doors", "vision"):
    sys.path.insert(0, str(Path(__file__).parent.parent / folder))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", default="1/1", help="i/n: the i-th of n parts of the tests; see scripts/gpu-tests")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep one part. Tests that take much of the GPU's memory are the first; the others are dealt to the rest."""
    index, count = shard_of(str(config.getoption("--shard", default="1/1")))
    if count == 1:
        return
    heavy = [item for item in items if item.get_closest_marker("one_process")]
    light = [item for item in items if not item.get_closest_marker("one_process")]
    kept = set(heavy if index == 1 else light[index - 2 :: count - 1])
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def shard_of(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    if not (index.isdigit() and count.isdigit() and 1 <= int(index) <= int(count)):
        raise pytest.UsageError(f"--shard {text}: pass a part and the number of parts, such as 1/4")
    return int(index), int(count)


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
def release_gpu() -> Iterator[None]:
    """Return the memory of a large test to the GPU."""
    yield
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@pytest.fixture
def own_kernels(device: str, request: pytest.FixtureRequest) -> None:
    """For tests of promises that the GPU's own kernels alone make."""
    if request.config.getoption("--device") == "torch":
        pytest.skip("needs the GPU's own kernels")


@pytest.fixture(scope="session")
def compiled(request: pytest.FixtureRequest) -> None:
    """For tests that tests/interpreter has in smaller shapes."""
    if request.config.getoption("--device") == "interpret":
        pytest.skip("tests/interpreter runs these without a GPU")


@pytest.fixture(scope="session")
def new_kernels(gpu_kernels: MakeKernels) -> Callable[[], Any]:
    """Kernels for tests that are imported from elsewhere."""
    return gpu_kernels


@pytest.fixture(scope="session")
def new_engine(gpu_kernels: MakeKernels) -> Callable[..., Any]:
    """A small engine whose steps are captured and overlap; options as those of `built_engines.built_engine`."""

    def make(dtype: str = "f32", *, deterministic: bool = False, **options: Any) -> Any:
        from built_engines import built_engine

        options.pop("kernels", None)
        kernels = gpu_kernels(dtype, deterministic=deterministic)
        options.setdefault("cache_dtype", dtype)
        return built_engine(kernels=kernels, **options)

    return make
