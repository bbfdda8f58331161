"""Tensors that a file stores in another form than the network takes them: joined rows, other names, vectors for rows.

A form is read by `source` and written by `tensors`; names are ends of full names, without `.weight` or `.bias`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bifolio.config import ModelConfig
from bifolio.model.export import JoinedRows, NamedTensor
from bifolio.model.model_file import TensorSource
from bifolio.quant.tensor import QuantizedTensor

Rows = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Joined:
    """One stored matrix that holds the rows of several."""

    stored: str
    parts: tuple[tuple[str, Rows], ...]  # (name, numbers of its rows in the stored matrix)

    @property
    def num_rows(self) -> int:
        return sum(len(rows) for _, rows in self.parts)


@dataclass(frozen=True, slots=True)
class StoredForm:
    """The differences between a file and the network."""

    joined: tuple[Joined, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()  # (name with its suffix, name in the file)
    flat: tuple[str, ...] = ()  # names with their suffix: matrices [1, d] that the file stores as vectors [d]
    rows: tuple[str, ...] = ()  # names with their suffix: vectors [d] that the file stores as matrices [1, d]
    turned: tuple[str, ...] = ()  # names with their suffix: matrices that the file stores transposed

    def source(self, source: TensorSource) -> TensorSource:
        return source if self == StoredForm() else StoredTensors(source, self)

    def tensors(self, tensors: Iterator[NamedTensor]) -> Iterator[NamedTensor]:
        """The tensors as the file stores them. The parts of a joined matrix follow each other within a layer."""
        waiting: dict[str, dict[str, NamedTensor]] = {}
        for tensor in tensors:
            found = self.part_of(tensor.name)
            if found is None:
                yield self._in_file(tensor)
                continue
            joined, part, stored = found
            parts = waiting.setdefault(stored, {})
            parts[part] = tensor
            if len(parts) == len(joined.parts):
                values = tuple(parts[name].rearranged() for name, _ in joined.parts)
                rows = tuple(rows for _, rows in joined.parts)
                yield NamedTensor(stored, JoinedRows(values, rows), tensor.kind)
                del waiting[stored]

    def part_of(self, name: str) -> tuple[Joined, str, str] | None:
        """The joined matrix that holds a tensor, the name of the part, and the full name of the matrix."""
        base, _, suffix = name.rpartition(".")
        for joined in self.joined:
            for part, _ in joined.parts:
                if base.endswith("." + part):
                    return joined, part, f"{base.removesuffix(part)}{joined.stored}.{suffix}"
        return None

    def in_file(self, name: str) -> str:
        """The name in the file of a tensor that is not a part."""
        for ours, theirs in self.renamed:
            if name.endswith("." + ours):
                return name.removesuffix(ours) + theirs
        return name

    def shape_in_file(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape in the file of a tensor that is not a part."""
        if any(name.endswith("." + end) for end in self.flat):
            return shape[-1:]
        return (1, *shape) if any(name.endswith("." + end) for end in self.rows) else shape

    def is_turned(self, name: str) -> bool:
        return any(name.endswith("." + end) for end in self.turned)

    def _in_file(self, tensor: NamedTensor) -> NamedTensor:
        if self.is_turned(tensor.name):
            return replace(tensor, name=self.in_file(tensor.name), tensor=_transposed(tensor.rearranged()))
        stored, shape = self.in_file(tensor.name), self.shape_in_file(tensor.name, tensor.tensor.shape)
        if shape == tensor.tensor.shape:
            return replace(tensor, name=stored)
        return replace(tensor, name=stored, tensor=tensor.rearranged().reshape(*shape))


@dataclass(frozen=True, slots=True)
class StoredTensors:
    """The tensors of a file in the form that the network takes."""

    inner: TensorSource
    form: StoredForm

    def has(self, name: str) -> bool:
        found = self.form.part_of(name)
        return self.inner.has(self.form.in_file(name) if found is None else found[2])

    def view(self, name: str, shape: tuple[int, ...]) -> QuantizedTensor:
        found = self.form.part_of(name)
        if found is None and self.form.is_turned(name):
            return _transposed(self.inner.view(self.form.in_file(name), (*shape[:-2], shape[-1], shape[-2])))
        if found is None:
            tensor = self.inner.view(self.form.in_file(name), self.form.shape_in_file(name, shape))
            return tensor if tensor.shape == shape else tensor.reshape(*shape)
        joined, part, stored = found
        rows = dict(joined.parts)[part]
        tensor = self.inner.view(stored, (joined.num_rows, *shape[1:]))
        if len(shape) == 1:
            return QuantizedTensor.from_array(tensor.dequantize()[rows])
        first, last = int(rows[0]), int(rows[-1])
        is_span = last - first + 1 == len(rows) and bool((np.diff(rows) == 1).all())
        return tensor.select_rows(slice(first, last + 1) if is_span else rows)


def _transposed(tensor: QuantizedTensor) -> QuantizedTensor:
    """The last two dimensions in the other order, in the format of the tensor if that rounds nothing."""
    turned = QuantizedTensor.from_array(np.ascontiguousarray(np.asarray(tensor.dequantize()).swapaxes(-1, -2)))
    return turned if tensor.format.is_quantized else turned.converted(tensor.format)


def joined_heads(config: ModelConfig, stored: str, names: tuple[str, ...]) -> StoredForm:
    """Queries, keys and values, one behind the other in one matrix."""
    ends = np.cumsum([config.query_size, config.kv_size, config.kv_size])
    rows = np.split(np.arange(ends[-1]), ends[:-1])
    return StoredForm(joined=(Joined(stored, tuple(zip(names, rows, strict=True))),))


def either_qkv(source: TensorSource, config: ModelConfig) -> TensorSource:
    """GGUF files that were converted from the first folders of a family have queries, keys and values in one matrix."""
    if not source.has("blk.0.attn_qkv.weight"):
        return source
    return joined_heads(config, "attn_qkv", ("attn_q", "attn_k", "attn_v")).source(source)


def reading(form: Callable[[ModelConfig], StoredForm]) -> Callable[[TensorSource, ModelConfig], TensorSource]:
    """The hook of a family that reads files in this form."""
    return lambda source, config: form(config).source(source)


def writing(
    form: Callable[[ModelConfig], StoredForm],
) -> Callable[[Iterator[NamedTensor], ModelConfig], Iterator[NamedTensor]]:
    """The hook of a family that writes files in this form."""
    return lambda tensors, config: form(config).tensors(tensors)
