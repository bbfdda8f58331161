"""Selection of the kernel set: the first candidate that can run on the device.

    cpu    native, then torch or reference (with one warning that they are slow)
    cuda   triton, then torch

`BIFOLIO_KERNELS=reference|native|torch|triton`, or a name passed by the caller, forces one set; if it cannot run, an
error lists the reasons.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from bifolio.config import NUMERICS
from bifolio.errors import ConfigError, MissingDependencyError
from bifolio.kernels.interface import KernelSet

ACTIVATIONS = ("auto", "int8", "int16")
SMALL_MODEL = 1_000_000_000  # parameters, below which activations have 16 bits


class Wanted(NamedTuple):
    """The settings of a kernel set."""

    device: str
    threads: int | None
    activations: str
    dtype: str | None
    deterministic: bool


class Candidate(NamedTuple):
    """A kernel set that may be selected."""

    devices: tuple[str, ...]
    refusals: Callable[[], list[str]]  # reasons why it cannot run on this machine
    make: Callable[[Wanted], KernelSet]


def select_kernels(
    device: str = NUMERICS.device,
    *,
    name: str | None = None,
    threads: int | None = NUMERICS.threads,
    activations: str = "int8",
    dtype: str | None = None,
    deterministic: bool = NUMERICS.deterministic,
) -> KernelSet:
    """The kernel set for a device ("auto", "cpu", "cuda", "cuda:1"); a ConfigError lists why none can run.

    With a forced set of the CPU, "auto" is the CPU.
    `activations` is the rounding of activations in products with quantised weights: see `NativeKernels`; callers that
    know the model resolve "auto" first (`activations_for`). `dtype`
    ("f32", "f16", "bf16") is that of dense weights on a GPU, by default bf16. `deterministic` makes results on a GPU
    independent of the rest of the batch; on the CPU they always are.
    """
    forced = name or os.environ.get("BIFOLIO_KERNELS") or None
    if forced is not None and forced not in CANDIDATES:
        raise ConfigError(f"there are no kernels called {forced!r}: choose one of {', '.join(CANDIDATES)}")
    if device == "auto" and forced is not None and CANDIDATES[forced].devices == ("cpu",):
        device = "cpu"
    device = resolve_device(device)
    kind = device.split(":")[0]
    if kind == "cuda":
        require_gpu(device)
    names = [forced] if forced else [n for n, candidate in CANDIDATES.items() if kind in candidate.devices]
    refusals: list[str] = []
    for candidate_name in names:
        candidate = CANDIDATES[candidate_name]
        reasons = _refusals(candidate, kind)
        if not reasons:
            if kind == "cpu" and candidate_name != "native" and forced is None:
                _warn_slow(candidate_name, "; ".join(refusals))
            return candidate.make(Wanted(device, threads, activations, dtype, deterministic))
        refusals.append(f"{candidate_name}: {', '.join(reasons)}")
    raise ConfigError(f"no kernels can run on {device!r} ({'; '.join(refusals) or 'unknown device'}): use cpu or cuda")


def activations_for(wanted: str, num_parameters: int, both_ways: bool = False) -> str:
    """The rounding of activations beside quantised weights for a model of this size: "auto" as "int8" or "int16".

    Rounding to 8 bits moves logits by about 0.1. Small models have many near-ties within this, so they get 16 bits
    and answer as with exact activations. The tiles of AMX multiply bfloat16, which is fine enough for all. Encoders
    (`both_ways`) choose no tokens: 8 bits add less to the error of a vector than the weights have.
    """
    if wanted not in ACTIVATIONS:
        raise ConfigError(f"activations (--activations) is {wanted!r}: pass auto, int8 or int16")
    if wanted != "auto":
        return wanted
    is_small = num_parameters < SMALL_MODEL and not both_ways
    return "int16" if is_small and not _native_refusals() and not _has_tiles() else "int8"


def torch_kernels(device: str, dtype: str) -> KernelSet:
    """The differentiable set on torch tensors, in any type ("f32", "f16", "bf16") on any device: for training."""
    from bifolio.kernels.torch_reference import TorchKernels

    return TorchKernels(device, dtype)


def resolve_device(device: str) -> str:
    """ "auto" is the GPU when there is one and torch is installed, else the CPU. Torch is not imported."""
    if device != "auto":
        return device
    has_gpu = Path("/dev/nvidia0").exists() and not _module_refusals("torch")
    return "cuda" if has_gpu else "cpu"


def require_gpu(device: str) -> None:
    """Raise ConfigError unless torch is installed and can use this CUDA device ("cuda", "cuda:1")."""
    if _module_refusals("torch"):
        raise ConfigError(f"device {device!r} needs torch: pip install 'bifolio[gpu]', or use the device 'cpu'")
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(f"device {device!r} needs a CUDA GPU, and torch {torch.__version__} finds none: use 'cpu'")
    index, count = device.partition(":")[2] or "0", torch.cuda.device_count()
    if not index.isdecimal() or int(index) >= count:
        names = ", ".join(f"'cuda:{number}'" for number in range(count))
        raise ConfigError(f"there is no device {device!r} here: use one of {names}")


def _refusals(candidate: Candidate, kind: str) -> list[str]:
    if kind not in candidate.devices:
        return [f"does not run on {kind}"]
    return candidate.refusals()


def _native_refusals() -> list[str]:
    from bifolio.kernels.native import library

    try:
        library()
    except MissingDependencyError as error:
        return [str(error)]
    return []


def _has_tiles() -> bool:
    from bifolio.kernels.native import isa

    return isa() == "amx"


def _module_refusals(*modules: str) -> list[str]:
    missing = []
    for module in modules:
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            found = None
        if found is None:
            missing.append(f"{module} is not installed")
    return missing


def _make_native(wanted: Wanted) -> KernelSet:
    from bifolio.kernels.native import NativeKernels

    return NativeKernels(wanted.threads, wanted.activations)


def _make_reference(wanted: Wanted) -> KernelSet:
    from bifolio.kernels.reference import ReferenceKernels

    return ReferenceKernels()


def _make_torch(wanted: Wanted) -> KernelSet:
    return torch_kernels(wanted.device, (wanted.dtype or "bf16") if wanted.device.startswith("cuda") else "f32")


def _make_triton(wanted: Wanted) -> KernelSet:
    from bifolio.kernels.triton import TritonKernels

    return TritonKernels(wanted.device, wanted.dtype or "bf16", deterministic=wanted.deterministic)


CANDIDATES = {
    "native": Candidate(("cpu",), _native_refusals, _make_native),
    "triton": Candidate(("cuda",), lambda: _module_refusals("torch", "triton", "bifolio.kernels.triton"), _make_triton),
    "torch": Candidate(("cuda", "cpu"), lambda: _module_refusals("torch"), _make_torch),
    "reference": Candidate(("cpu",), list, _make_reference),
}


@cache
def _warn_slow(name: str, reasons: str) -> None:
    """Warn once per process and reason."""
    print(f"bifolio: running on the {name} kernels, which are slow. {reasons}", file=sys.stderr)
