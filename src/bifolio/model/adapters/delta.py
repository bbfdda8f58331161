"""The changes that an adapter file makes, by the names of the tensors of its base."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from bifolio.errors import ModelFileError
from bifolio.quant.tensor import QuantizedTensor

Matrix = NDArray[Any]  # f32 or f16
T = TypeVar("T")
R = TypeVar("R")


def in_parallel(function: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """The results in the order of the items; numpy and hashing release the interpreter lock."""
    with ThreadPoolExecutor(thread_name_prefix="bifolio-adapter") as pool:
        return list(pool.map(function, items))


def plain_name(name: str) -> str:
    """The name of a tensor without that of the language model, which models that read images put in front."""
    return name.replace("language_model.", "", 1).replace("text_model.", "", 1)


@dataclass(frozen=True, slots=True)
class Delta:
    """The change of one tensor: up @ down, with the scale of the adapter in `up`.

    Of a stack of matrices, such as those of all experts, `down` and `up` are stacks, too.
    """

    name: str  # of the tensor, with its suffix
    down: Matrix  # [r, in] or [count, r, in]
    up: Matrix  # [out, r] or [count, out, r]
    bias: NDArray[np.float32] | None = None  # f32[out]
    alternatives: tuple[Delta, ...] = ()  # of a stack: as one of another number of matrices

    @property
    def rank(self) -> int:
        return int(self.down.shape[-2])

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor that is changed."""
        return (*self.up.shape[:-1], self.down.shape[-1])

    def scaled(self, scale: float) -> Delta:
        bias = None if self.bias is None else scaled(self.bias, scale)
        return replace(self, up=scaled(self.up, scale), bias=bias)


@dataclass(frozen=True, slots=True)
class Changes:
    """All changes of an adapter file, by the names of the tensors of its base."""

    deltas: list[Delta]
    saved: Mapping[str, QuantizedTensor] = field(default_factory=dict)  # in place of those of the base
    copies: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # shapes of tensors of the base in the file
    modules: tuple[str, ...] = ()  # that the file says it saves
    ties: bool = False  # the embedding's changes are those of a tied head, too


def scaled(values: Matrix, scale: float) -> Matrix:
    """The values times a factor; half floats stay half floats where they hold the result to the last bit."""
    result = np.asarray(values, np.float32) * np.float32(scale)
    if values.dtype != np.float16:
        return result
    with np.errstate(over="ignore"):
        half = result.astype(np.float16)
    return half if np.array_equal(half, result) else result


def check_delta(delta: Delta, path: object, max_rank: int) -> Delta:
    """The delta, or an error that says which rule of adapters it breaks."""
    down, up = delta.down, delta.up
    if (
        down.ndim != up.ndim
        or down.ndim not in (2, 3)
        or down.shape[:-2] != up.shape[:-2]
        or up.shape[-1] != delta.rank
    ):
        raise ModelFileError(
            f"{path}: the two matrices of {delta.name!r} have the shapes {down.shape} and {up.shape}, which do not "
            "belong together: save the adapter again"
        )
    if not delta.rank or not all(down.shape) or not all(up.shape):
        raise ModelFileError(f"{path}: the change of {delta.name!r} is empty: save the adapter again")
    if delta.rank > max_rank:
        raise ModelFileError(
            f"{path}: the change of {delta.name!r} has rank {delta.rank}, above max_lora_rank={max_rank}: "
            "raise max_lora_rank"
        )
    for values in (down, up, delta.bias):
        if values is not None and not np.isfinite(values).all():
            raise ModelFileError(
                f"{path}: the change of {delta.name!r} has numbers that are not finite: train it again"
            )
    return delta
