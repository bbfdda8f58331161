"""The compiled module: import, instruction set, threads, and measured limits of the machine."""

from __future__ import annotations

import os
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

from bifolio.errors import ConfigError, MissingDependencyError


@cache
def library() -> Any:
    """The compiled module; raises MissingDependencyError with the reason if it cannot be imported."""
    try:
        from bifolio.kernels import _native  # type: ignore[attr-defined]
    except ImportError as error:
        raise MissingDependencyError(
            f"the native CPU kernels are not built ({error}): install a C++20 compiler and reinstall bifolio"
        ) from error
    forced = os.environ.get("BIFOLIO_ISA", "")
    if forced:
        set_isa(forced, _native)
    return _native


@cache
def library_digest() -> str:
    """A digest of the compiled module, by which builds are told apart."""
    return blake2b(Path(library().__file__).read_bytes(), digest_size=16).hexdigest()


def isa() -> str:
    """The instruction set in use."""
    return str(library().isa())


def available_isas() -> list[str]:
    """The instruction sets this machine can run, best first."""
    return list(library().available_isas())


def set_isa(name: str, module: Any = None) -> None:
    """Use this instruction set, "" for the best one. Packed weights stay valid: the layout is the same for all."""
    try:
        (module or library()).set_isa(name)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def set_num_threads(count: int) -> None:
    """Set the size of the thread pool of the process, the calling thread included; 0 for one per physical core."""
    library().set_num_threads(count)


def num_threads() -> int:
    return int(library().num_threads())


def read_bandwidth(num_bytes: int = 256 << 20) -> float:
    """Bytes per second that all threads together read from memory: the bound of decoding."""
    return float(library().read_bandwidth(num_bytes))


def product_rate(of_bytes: bool) -> float:
    """Operations per second on registers, of bytes or of floats (with AMX: bfloat16): the bound of prefill."""
    return float(library().product_rate(of_bytes))


def shared_tokens() -> int:
    """Token reads that attention saved since the start of the process: a shared prefix counts once per layer for each
    sequence except the first."""
    return int(library().shared_tokens())
