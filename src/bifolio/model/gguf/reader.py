"""GGUF files: a header of metadata and tensor entries, then the bytes of the tensors.

    |"GGUF"|version: u32|tensors: u64|entries: u64|metadata ...|tensor entries ...|padding|data ...|

All counts, lengths, dimension products, offsets, alignments and ranges are checked in exact arithmetic against the
size of the file, and overlaps are rejected, before a tensor can be read. Long arrays and tensors are views of the
mapped file, so opening a file reads only its header.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from bifolio.errors import MissingDependencyError, ModelFileError, UnsupportedModelError
from bifolio.kernels import cpu
from bifolio.model.file_access import map_file
from bifolio.quant.formats import Bytes, QuantFormat
from bifolio.quant.tensor import QuantizedTensor

FLOAT32, BOOL, STRING, ARRAY = 6, 7, 8, 9
_SCALARS: dict[int, str] = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?"}
_SCALARS |= {10: "<u8", 11: "<i8", 12: "<f8"}
_SCALAR_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
SCALAR_STRUCTS = {kind: struct.Struct("<" + code) for kind, code in _SCALAR_CODES.items()}
_U32, _U64 = SCALAR_STRUCTS[4], SCALAR_STRUCTS[10]

DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4
_MAX_KEY_BYTES = 65535
_MAX_STRINGS = 1 << 24  # in one array; the largest vocabularies have about 256,000 tokens
_MAX_NESTING = 3
_MIN_ENTRY_BYTES = 13  # an empty key, its type, one byte
_MIN_TENSOR_BYTES = 32  # an empty name, one dimension


class StringArray(Sequence[str]):
    """An array of strings in the file; each is decoded on access."""

    def __init__(self, data: Bytes, starts: NDArray[np.uint64], what: str) -> None:
        self.data = data  # u8[file size]
        self.starts = starts  # u64[strings]  byte offset of the length field of each string
        self._buffer = data.data
        self._what = what

    def __len__(self) -> int:
        return len(self.starts)

    def __iter__(self) -> Iterator[str]:
        return map(self._text, range(len(self)))

    def texts(self) -> list[str]:
        """All strings, decoded at once: they lie one after the other, each behind its length."""
        starts, buffer = self.starts.tolist(), self._buffer
        if not starts:
            return []
        ends = [*starts[1:], starts[-1] + 8 + _U64.unpack_from(buffer, starts[-1])[0]]
        try:
            return [str(buffer[start + 8 : end], "utf-8") for start, end in zip(starts, ends, strict=True)]
        except UnicodeDecodeError:
            return list(self)  # says which string it is

    def raw(self, index: int) -> bytes:
        """The undecoded bytes of a string."""
        start = int(self.starts[index])
        return bytes(self._buffer[start + 8 : start + 8 + _U64.unpack_from(self._buffer, start)[0]])

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self._text(i) for i in range(*index.indices(len(self)))]
        return self._text(index)

    def _text(self, index: int) -> str:
        raw = self.raw(index)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise ModelFileError(f"{self._what}: string {index} is not UTF-8: {raw[:40]!r}") from None

    def __repr__(self) -> str:
        return f"StringArray({len(self)} strings)"


# A metadata value: a number, a boolean, a string, an array of these, or a (short) list of arrays.
Value = int | float | bool | str | NDArray[Any] | StringArray | list[Any]


class MetadataSpan(NamedTuple):
    """Location and type of a metadata value: its bytes are those from `start` to `end` of the file."""

    kind: int  # the number of the type in a GGUF file
    start: int
    end: int


class TensorEntry(NamedTuple):
    """Location, shape and format of a tensor."""

    name: str
    shape: tuple[int, ...]  # contiguous dimension last: reversed from the file
    format: QuantFormat
    offset: int  # in bytes from the start of the file
    nbytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A checked, mapped file."""

    path: Path
    version: int
    alignment: int
    metadata: dict[str, Value]
    spans: dict[str, MetadataSpan]  # of the values of `metadata`
    entries: dict[str, TensorEntry]  # in the order of the file
    data: Bytes  # u8[file size]
    data_start: int
    shards: tuple[GgufFile, ...] = ()  # all files of a model in several; `entries` are those of all of them

    def tensor(self, name: str) -> QuantizedTensor:
        """A view of a tensor in the format of the file."""
        for shard in self.shards:
            if name in shard.entries:
                return shard.tensor(name)
        entry = self.entries[name]
        rows = math.prod(entry.shape[:-1])
        data = self.data[entry.offset : entry.offset + entry.nbytes].reshape(rows, -1)
        return QuantizedTensor(entry.format, data, entry.shape, name)


def open_gguf(path: str | Path) -> GgufFile:
    """Check the header of `path` and map the file; ModelFileError describes the first defect."""
    path = Path(path)
    data = map_file(path)
    return _HeaderParser(path, data).parse()


def read_metadata(path: Path, header: Bytes) -> dict[str, Value]:
    """The metadata of a header without tensors; ModelFileError describes the first defect."""
    return _HeaderParser(path, header).parse().metadata


def string_starts(data: Bytes, position: int, count: int) -> tuple[NDArray[np.uint64], int]:
    """Offsets of `count` strings from `position` on, and the end of the last; -1 if one ends after the data."""
    starts = np.empty(count, np.uint64)
    try:
        return starts, cpu.string_starts(data, position, starts)
    except MissingDependencyError:
        return starts, walk_strings(data, position, starts)


def walk_strings(data: Bytes, position: int, starts: NDArray[np.uint64]) -> int:
    """The same in Python: fill `starts` and return the end."""
    buffer, size = data.data, len(data)
    for index in range(len(starts)):
        if position + 8 > size:
            return -1
        starts[index] = position
        position += 8 + _U64.unpack_from(buffer, position)[0]
    return position if position <= size else -1


class _HeaderParser:
    """Reads from `position` on, never past the end of the file."""

    def __init__(self, path: Path, data: Bytes) -> None:
        self.path = path
        self.data = data
        self.buffer = data.data
        self.size = int(data.size)
        self.position = 0
        self.spans: dict[str, MetadataSpan] = {}

    def parse(self) -> GgufFile:
        version = self._check_start()
        num_tensors, num_entries = self._unpack(_U64), self._unpack(_U64)
        self._check_count(num_entries, _MIN_ENTRY_BYTES, "metadata entries")
        metadata = self._read_metadata(num_entries)
        self._check_count(num_tensors, _MIN_TENSOR_BYTES, "tensors")
        relative = self._read_entries(num_tensors)
        alignment = self._alignment(metadata)
        data_start = -(-self.position // alignment) * alignment
        entries = {name: self._place(entry, data_start, alignment) for name, entry in relative.items()}
        self._check_overlap(entries)
        return GgufFile(self.path, version, alignment, metadata, self.spans, entries, self.data, data_start)

    def fail(self, message: str) -> ModelFileError:
        return ModelFileError(f"{self.path}: {message}")

    def _check_start(self) -> int:
        if self.size < 24:
            raise self.fail(f"{self.size} bytes are too few for a GGUF file: fetch it again")
        if bytes(self.buffer[:4]) != b"GGUF":
            raise self.fail("this is not a GGUF file: it does not begin with 'GGUF'")
        self.position = 4
        version: int = self._unpack(_U32)
        if version in (2, 3):
            return version
        if version & 0xFFFF == 0 and version:
            raise UnsupportedModelError(f"{self.path}: the file is big-endian: convert it to little-endian")
        raise UnsupportedModelError(f"{self.path}: GGUF version {version} is not supported: convert it to version 3")

    def _need(self, num_bytes: int, what: str) -> None:
        if num_bytes > self.size - self.position:
            raise self.fail(f"{what} would end after the end of the file, which is damaged or truncated")

    def _check_count(self, count: int, least_bytes: int, what: str) -> None:
        """Reject a count that the rest of the file cannot hold, before allocating for it."""
        if count * least_bytes > self.size - self.position:
            raise self.fail(f"{count} {what} do not fit into the file, which is damaged or truncated")

    def _unpack(self, scalar: struct.Struct) -> Any:
        self._need(scalar.size, "a number of the header")
        value = scalar.unpack_from(self.buffer, self.position)[0]
        self.position += scalar.size
        return value

    def _read_bytes(self, what: str, limit: int | None = None) -> bytes:
        length = self._unpack(_U64)
        if limit is not None and length > limit:
            raise self.fail(f"{what} has {length} bytes, more than the {limit} allowed")
        self._need(length, what)
        value = bytes(self.buffer[self.position : self.position + length])
        self.position += length
        return value

    def _read_name(self, what: str) -> str:
        raw = self._read_bytes(what, _MAX_KEY_BYTES)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self.fail(f"{what} is not UTF-8: {raw[:40]!r}") from None

    def _read_metadata(self, count: int) -> dict[str, Value]:
        metadata: dict[str, Value] = {}
        for _ in range(count):
            key = self._read_name("a metadata key")
            if key in metadata:
                raise self.fail(f"metadata key {key!r} occurs twice")
            kind, start = self._unpack(_U32), self.position
            metadata[key] = self._read_value(kind, key, 0)
            self.spans[key] = MetadataSpan(kind, start, self.position)
        return metadata

    def _read_value(self, kind: int, key: str, nesting: int) -> Value:
        if kind == STRING:
            return self._read_bytes(f"the string {key!r}").decode(errors="replace")
        if kind == ARRAY:
            return self._read_array(key, nesting + 1)
        scalar = SCALAR_STRUCTS.get(kind)
        if scalar is None:
            raise self.fail(f"metadata {key!r} has the unknown type {kind}")
        value: int | float | bool = self._unpack(scalar)
        # The shortest number that rounds to the stored single: 1e-05, not 9.999999747378752e-06.
        return float(str(np.float32(value))) if kind == FLOAT32 else value

    def _read_array(self, key: str, nesting: int) -> Value:
        if nesting > _MAX_NESTING:
            raise self.fail(f"metadata {key!r} is nested more than {_MAX_NESTING} deep")
        kind, count = self._unpack(_U32), self._unpack(_U64)
        if kind == STRING:
            return self._read_strings(key, count)
        if kind == ARRAY:
            self._check_count(count, 12, f"arrays of {key!r}")
            if count > _MAX_KEY_BYTES:
                raise self.fail(f"metadata {key!r} has {count} arrays, more than the {_MAX_KEY_BYTES} allowed")
            return [self._read_array(key, nesting + 1) for _ in range(count)]
        if kind not in _SCALARS:
            raise self.fail(f"the array {key!r} has the unknown type {kind}")
        dtype = np.dtype(_SCALARS[kind])
        self._check_count(count, dtype.itemsize, f"values of {key!r}")
        start = self.position
        self.position += count * dtype.itemsize
        values = self.data[start : self.position].view(np.uint8 if kind == BOOL else dtype)
        return values != 0 if kind == BOOL else values

    def _read_strings(self, key: str, count: int) -> StringArray:
        """Skip the strings, checking that each ends inside the file."""
        self._check_count(count, 8, f"strings of {key!r}")
        if count > _MAX_STRINGS:
            raise self.fail(f"{key!r} has {count} strings, more than the {_MAX_STRINGS} allowed")
        starts, end = string_starts(self.data, self.position, count)
        if end < 0:
            raise self.fail(f"the strings of {key!r} end after the end of the file, which is damaged or truncated")
        self.position = end
        return StringArray(self.data, starts, f"{self.path}: {key}")

    def _read_entries(self, count: int) -> dict[str, TensorEntry]:
        entries: dict[str, TensorEntry] = {}
        for _ in range(count):
            name = self._read_name("a tensor name")
            if name in entries:
                raise self.fail(f"tensor {name!r} occurs twice")
            num_dimensions = self._unpack(_U32)
            if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
                raise self.fail(f"tensor {name!r} has {num_dimensions} dimensions instead of 1 to {_MAX_DIMENSIONS}")
            shape = tuple(reversed([self._unpack(_U64) for _ in range(num_dimensions)]))
            ggml_type, offset = self._unpack(_U32), self._unpack(_U64)
            format = QuantFormat.from_ggml_type(ggml_type)
            if format is None:
                raise UnsupportedModelError(
                    f"{self.path}: tensor {name!r} has a type whose number {ggml_type} is unknown: use another file"
                )
            if 0 in shape or shape[-1] % format.block_elements:
                raise self.fail(
                    f"tensor {name!r} of shape {shape} cannot be stored in blocks of {format.block_elements} values"
                )
            entries[name] = TensorEntry(name, shape, format, offset, format.bytes_for(shape))
        return entries

    def _alignment(self, metadata: dict[str, Value]) -> int:
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise self.fail(f"general.alignment must be a power of two, not {alignment!r}")
        return alignment

    def _place(self, entry: TensorEntry, data_start: int, alignment: int) -> TensorEntry:
        if entry.offset % alignment:
            raise self.fail(
                f"tensor {entry.name!r} starts at {entry.offset}, which is not aligned to {alignment} bytes"
            )
        offset = data_start + entry.offset
        if offset + entry.nbytes > self.size:
            raise self.fail(f"tensor {entry.name!r} ends after the end of the file, which is damaged or truncated")
        return entry._replace(offset=offset)

    def _check_overlap(self, entries: dict[str, TensorEntry]) -> None:
        end, previous = 0, ""
        for entry in sorted(entries.values(), key=lambda entry: entry.offset):
            if entry.offset < end:
                raise self.fail(f"tensors {previous!r} and {entry.name!r} overlap")
            end, previous = entry.offset + entry.nbytes, entry.name
