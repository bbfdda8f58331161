"""Which kernel set runs a model: the first of the candidates that has no reason to refuse.

    cpu    native, then torch or reference (which say once that they are slow)
    cuda   triton, then torch

`BIFOLIO_KERNELS=reference|native|torch|triton`, or a name passed by the caller, forces one; its refusal is an error
that lists the reasons.
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


class Wanted(NamedTuple):
    """What a kernel set is made for."""

    device: str
    threads: int | None
    activations: str
    dtype: str | None
    deterministic: bool


class Candidate(NamedTuple):
    """A kernel set that might be used."""

    devices: tuple[str, ...]
    refusals: Callable[[], list[str]]  # reasons why it cannot run here; empty: it can
    make: Callable[[Wanted], KernelSet]


def select_kernels(
    device: str = NUMERICS.device,
    *,
    name: str | None = None,
    threads: int | None = NUMERICS.threads,
    activations: str = NUMERICS.activations,
    dtype: str | None = None,
    deterministic: bool = NUMERICS.deterministic,
) -> KernelSet:
    """The kernel set for a device ("auto", "cpu", "cuda", "cuda:1"); ConfigError lists why nothing fits.

    `activations` says how the native kernels round them beside quantised weights: see `NativeKernels`. `dtype` ("f32",
    "f16", "bf16") is that of dense weights on a GPU, bf16 unless told. `deterministic` asks a GPU for results that do
    not depend on the rest of the batch; on the CPU they never do.
    """
    device = resolve_device(device)
    kind = device.split(":")[0]
    forced = name or os.environ.get("BIFOLIO_KERNELS") or None
    if forced is not None and forced not in CANDIDATES:
        raise ConfigError(f"there are no kernels called {forced!r}: choose one of {', '.join(CANDIDATES)}")
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


def resolve_device(device: str) -> str:
    """ "auto" is the GPU when there is one and torch to drive it, else the CPU. Torch is not imported to find out."""
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
    from bifolio.kernels.torch_reference import TorchKernels

    return TorchKernels(wanted.device, (wanted.dtype or "bf16") if wanted.device.startswith("cuda") else "f32")


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
    """Once per process and reason."""
    print(f"bifolio: running on the {name} kernels, which are slow. {reasons}", file=sys.stderr)
