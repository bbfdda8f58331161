"""The compiled module: finding it, choosing its instruction set, its threads, and the limits it measures."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

from bifolio.errors import ConfigError, MissingDependencyError


@cache
def library() -> Any:
    """The compiled module; MissingDependencyError says why it is not there."""
    try:
        from bifolio.kernels import _native  # type: ignore[attr-defined]
    except ImportError as error:
        raise MissingDependencyError(
            f"the native CPU kernels were not built ({error}): install a C++20 compiler and reinstall bifolio"
        ) from error
    forced = os.environ.get("BIFOLIO_ISA", "")
    if forced:
        set_isa(forced, _native)
    return _native


def isa() -> str:
    """The instruction set in use."""
    return str(library().isa())


def available_isas() -> list[str]:
    """The instruction sets this machine can run, best first."""
    return list(library().available_isas())


def set_isa(name: str, module: Any = None) -> None:
    """Use this instruction set, "" for the best one. Weights packed before stay valid: the layout is the same."""
    try:
        (module or library()).set_isa(name)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def set_num_threads(count: int) -> None:
    """Threads of the pool of the process, the calling one included; 0 for one per physical core."""
    library().set_num_threads(count)


def num_threads() -> int:
    return int(library().num_threads())


def read_bandwidth(num_bytes: int = 256 << 20) -> float:
    """Bytes per second that all threads together read from memory: what bounds decoding."""
    return float(library().read_bandwidth(num_bytes))


def product_rate(of_bytes: bool) -> float:
    """Operations per second in registers alone, of bytes or of floats (with AMX: bfloat16): what bounds prefill."""
    return float(library().product_rate(of_bytes))


def shared_tokens() -> int:
    """Tokens of contexts that attention was spared reading, since the start of the process: those of a prefix that
    sequences share count once for each sequence but the first, in every layer."""
    return int(library().shared_tokens())
