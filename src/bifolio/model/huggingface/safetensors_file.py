"""safetensors files: a JSON header with byte ranges, then the data.

    |n: u64 little-endian|n bytes of JSON|data: every byte belongs to exactly one tensor|

The whole header is checked in exact arithmetic against the size of the file before a tensor can be read; tensors are
views of the mapped file. A tensor of an unsupported type raises on access only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bifolio.errors import ConfigError, ModelFileError
from bifolio.model.file_access import atomic_write, map_file
from bifolio.quant.formats import Bytes, QuantFormat
from bifolio.quant.tensor import QuantizedTensor

_FORMATS = {"F32": QuantFormat.F32, "F16": QuantFormat.F16, "BF16": QuantFormat.BF16, "U8": QuantFormat.I8}
_FORMATS |= {"I64": QuantFormat.I64}
_DTYPE_NAMES = {format: name for name, format in _FORMATS.items()}
_ITEM_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E5M2": 1,
    "F8_E4M3": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "I32": 4,
    "U32": 4,
}
_ITEM_BYTES |= {"F64": 8, "I64": 8, "U64": 8, "F16": 2, "BF16": 2, "F32": 4}

# A tensor takes about 100 bytes of header, so this allows 160,000 tensors. Together with the minimum average size of an
# object or list in a valid header, it bounds the memory that parsing can allocate.
_MAX_HEADER_BYTES = 16 << 20
_MIN_BYTES_PER_CONTAINER = 8
_MAX_DIMENSIONS = 8


class _Entry(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    start: int  # in bytes from the start of the file
    stop: int


class Tensors(Mapping[str, QuantizedTensor]):
    """Tensors by name, in the order of the file; each is created on access."""

    def __init__(self, path: Path, data: Bytes, entries: dict[str, _Entry]) -> None:
        self._path = path
        self._data = data
        self._entries = entries

    def __getitem__(self, name: str) -> QuantizedTensor:
        entry = self._entries[name]
        format = _FORMATS.get(entry.dtype)
        if format is None:
            raise ModelFileError(
                f"{self._path}: tensor {name!r} has type {entry.dtype}; bifolio reads {', '.join(_FORMATS)}"
            )
        rows = math.prod(entry.shape[:-1])
        row_bytes = format.row_bytes(entry.shape[-1] if entry.shape else 1)
        return QuantizedTensor(format, self._data[entry.start : entry.stop].reshape(rows, row_bytes), entry.shape, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape, also of tensors of unsupported types."""
        return self._entries[name].shape

    def dtype_of(self, name: str) -> str:
        return self._entries[name].dtype

    def format_of(self, name: str) -> str:
        """The name of the format; that of the type where it is not read."""
        format = _FORMATS.get(self.dtype_of(name))
        return self.dtype_of(name) if format is None else format.name

    def bytes_of(self, name: str) -> Bytes:
        entry = self._entries[name]
        return self._data[entry.start : entry.stop]


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """A checked, mapped file."""

    path: Path
    tensors: Tensors
    metadata: dict[str, str]


def open_safetensors(path: str | Path) -> SafetensorsFile:
    """Check the header of `path` and map the file; ModelFileError describes the first defect."""
    path = Path(path)
    data = map_file(path)
    header_end, header = _read_header(path, data)
    metadata = _check_metadata(path, header.pop("__metadata__", {}))
    entries = {name: _check_entry(path, name, value, header_end, data.size) for name, value in header.items()}
    _check_coverage(path, entries, header_end, data.size)
    return SafetensorsFile(path, Tensors(path, data, entries), metadata)


class TensorPlan(NamedTuple):
    """Name, type and shape of a tensor to be written."""

    name: str
    format: QuantFormat
    shape: tuple[int, ...]
    dtype: str = ""  # the type's name in the file, where it does not follow from the format


def write_safetensors(
    path: str | Path,
    tensors: Mapping[str, QuantizedTensor | NDArray[Any]],
    metadata: Mapping[str, str] | None = None,
    *,
    overwrite: bool = True,
) -> None:
    """Write dense tensors to a file that appears only when it is complete."""
    dense = {name: _as_dense(name, tensor) for name, tensor in tensors.items()}
    flags = {name for name, tensor in tensors.items() if isinstance(tensor, np.ndarray) and tensor.dtype == np.bool_}
    plans = [
        TensorPlan(name, tensor.format, tensor.shape, "BOOL" if name in flags else "") for name, tensor in dense.items()
    ]
    write_planned(Path(path), plans, dense.__getitem__, metadata, overwrite=overwrite)


def write_planned(
    path: Path,
    plans: Sequence[TensorPlan],
    produce: Callable[[str], QuantizedTensor],
    metadata: Mapping[str, str] | None = None,
    *,
    overwrite: bool = True,
) -> None:
    """Write tensors that `produce` creates one at a time, so that at most one is in memory."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for plan in plans:
        end = offset + plan.format.bytes_for(plan.shape)
        header[plan.name] = {
            "dtype": plan.dtype or _DTYPE_NAMES[plan.format],
            "shape": list(plan.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # data starts aligned to 8 bytes
    with atomic_write(path, overwrite=overwrite, size=offset) as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for plan in plans:
            tensor = produce(plan.name)
            if (tensor.format, tensor.shape) != plan[1:3]:
                raise ModelFileError(f"tensor {plan.name!r} is {tensor}, but {plan} was declared")
            file.write(np.ascontiguousarray(tensor.data).data)


def _as_dense(name: str, tensor: QuantizedTensor | NDArray[Any]) -> QuantizedTensor:
    if isinstance(tensor, np.ndarray) and tensor.dtype in (np.bool_, np.int64):
        format = QuantFormat.I64 if tensor.dtype == np.int64 else QuantFormat.I8
        rows = np.ascontiguousarray(tensor).reshape(math.prod(tensor.shape[:-1]), -1)
        return QuantizedTensor(format, rows.view(np.uint8), tensor.shape)
    dense = tensor if isinstance(tensor, QuantizedTensor) else QuantizedTensor.from_array(tensor)
    if dense.format.is_quantized:
        raise ConfigError(f"safetensors has no type for {dense.format.name}: convert {name!r} to f16 or bf16 first")
    return dense


def _read_header(path: Path, data: Bytes) -> tuple[int, dict[str, Any]]:
    """Offset of the data, and the JSON object before it."""
    if data.size < 8:
        raise ModelFileError(f"{path} has {data.size} bytes, too few for a safetensors file: fetch it again")
    length = int.from_bytes(data[:8].tobytes(), "little")
    if length > data.size - 8:
        raise ModelFileError(f"{path}: the header claims {length} bytes but the file has {data.size}: fetch it again")
    if length > _MAX_HEADER_BYTES:
        raise ModelFileError(f"{path}: the header has {length} bytes, more than the {_MAX_HEADER_BYTES} allowed")
    text = data[8 : 8 + length].tobytes()
    if (text.count(b"{") + text.count(b"[")) * _MIN_BYTES_PER_CONTAINER > max(length, 1024):
        raise ModelFileError(f"{path}: the header is not a list of tensors")
    try:
        header = json.loads(text.decode(), object_pairs_hook=_refuse_duplicates)
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path}: the header is not valid JSON: {error}") from None
    if not isinstance(header, dict):
        raise ModelFileError(f"{path}: the header is not a JSON object")
    return 8 + length, header


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name occurs twice")
    return result


def _check_metadata(path: Path, metadata: object) -> dict[str, str]:
    if isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values()):
        return metadata
    raise ModelFileError(f"{path}: __metadata__ must map names to strings")


def _check_entry(path: Path, name: str, value: object, header_end: int, file_size: int) -> _Entry:
    if not isinstance(value, dict) or not {"dtype", "shape", "data_offsets"} <= value.keys():
        raise ModelFileError(f"{path}: tensor {name!r} lacks dtype, shape or data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise ModelFileError(f"{path}: tensor {name!r} has a malformed dtype, shape or data_offsets")
    if len(shape) > _MAX_DIMENSIONS:
        raise ModelFileError(f"{path}: tensor {name!r} has {len(shape)} dimensions, more than {_MAX_DIMENSIONS}")
    start, stop = offsets
    if not start <= stop <= file_size - header_end:
        raise ModelFileError(f"{path}: tensor {name!r} is outside the file, which may be truncated")
    item_bytes = _ITEM_BYTES.get(dtype)
    if item_bytes is not None and math.prod(shape) * item_bytes != stop - start:
        raise ModelFileError(f"{path}: tensor {name!r} of {dtype} {shape} does not fit its {stop - start} bytes")
    return _Entry(dtype, tuple(shape), header_end + start, header_end + stop)


def _are_counts(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def _check_coverage(path: Path, entries: dict[str, _Entry], header_end: int, file_size: int) -> None:
    """Check that the tensors, sorted by offset, are contiguous and end with the file."""
    position = header_end
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != position:
            problem = "overlaps the one before it" if entry.start < position else "leaves a gap before it"
            raise ModelFileError(f"{path}: tensor {name!r} {problem}: the file is damaged")
        position = entry.stop
    if position != file_size:
        raise ModelFileError(f"{path}: {file_size - position} bytes belong to no tensor: the file is damaged")
