"""A hook around the operations of a kernel set, for measurements: any set, without a second copy of its protocol."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from copy import copy
from functools import partial
from typing import Any

from bifolio.kernels.interface import KernelSet, Operations

OPERATIONS = frozenset(name for part in Operations.__mro__[:2] for name in vars(part) if not name.startswith("_"))
Hook = Callable[..., Any]  # (name of the operation, the operation, *its arguments, **its options) -> its result


def operations_of(kernels: KernelSet) -> dict[str, Callable[..., Any]]:
    """The operations of a set by name."""
    return {name: work for name, work in inspect.getmembers(kernels, callable) if name in OPERATIONS}


def hooked(kernels: KernelSet, hook: Hook, names: Iterable[str] = OPERATIONS, *, one_by_one: bool = False) -> KernelSet:
    """A copy of the set whose operations run through the hook.

    The hook sees the calls of the network alone, not those of one operation within another. Steps are launched from
    the host, since a device that runs a whole step calls no operations. With `one_by_one` no program is recorded
    either, and the shared MLP of a mixture of experts is computed by itself.
    """
    measured: Any = copy(kernels)
    chosen = frozenset(names)
    own = {name: partial(hook, name, work) for name, work in operations_of(kernels).items() if name in chosen}
    off = ("device_slots", "record", "fold_shared") if one_by_one else ("device_slots",)
    vars(measured).update(own | dict.fromkeys(off, lambda *arguments: None))
    result: KernelSet = measured
    return result
