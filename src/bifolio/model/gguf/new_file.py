"""GGUF files made of the parts of others: metadata values and tensors are copied byte by byte, never decoded.

    |header: entries, places of the tensors|padding|tensor|padding|tensor|padding|

All files of one call appear under their names when the last is complete. Tensors are copied through one small buffer.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from bifolio.errors import ConfigError, ModelFileError
from bifolio.model.file_access import atomic_path, check_space, check_target
from bifolio.model.gguf.reader import DEFAULT_ALIGNMENT, GgufFile, TensorEntry, open_gguf
from bifolio.model.gguf.typed_values import encode_string

_VERSION = 3
_FIXED_BYTES = 24  # the magic word, the version and the two counts
_BUFFER_BYTES = 4 << 20
ALIGNMENT_KEY = "general.alignment"
Progress = Callable[[int, int], None]  # (bytes done, bytes in all)


class RawEntry(NamedTuple):
    """A metadata entry with the bytes of its value."""

    key: str
    kind: int
    value: bytes

    @property
    def nbytes(self) -> int:
        return len(encode_string(self.key)) + 4 + len(self.value)

    def encoded(self) -> bytes:
        return encode_string(self.key) + struct.pack("<I", self.kind) + self.value


class StoredTensor(NamedTuple):
    """A tensor and the file that holds it."""

    path: Path
    entry: TensorEntry


@dataclass(frozen=True, slots=True)
class NewFile:
    """A file to write."""

    path: Path
    entries: tuple[RawEntry, ...]
    tensors: tuple[StoredTensor, ...]

    @property
    def alignment(self) -> int:
        found = next((entry.value for entry in self.entries if entry.key == ALIGNMENT_KEY), b"")
        return int.from_bytes(found, "little") or DEFAULT_ALIGNMENT

    @property
    def header_bytes(self) -> int:
        """Bytes before the first tensor, padding included."""
        fields = sum(entry.nbytes for entry in self.entries) + sum(place_bytes(t.entry) for t in self.tensors)
        return header_size(fields, self.alignment)

    @property
    def size(self) -> int:
        return self.header_bytes + sum(padded(tensor.entry.nbytes, self.alignment) for tensor in self.tensors)

    def header(self) -> bytes:
        """All bytes before the first tensor."""
        fixed = b"GGUF" + struct.pack("<IQQ", _VERSION, len(self.tensors), len(self.entries))
        fields, offset = [entry.encoded() for entry in self.entries], 0
        for tensor in self.tensors:
            fields.append(_place(tensor.entry, offset))
            offset += padded(tensor.entry.nbytes, self.alignment)
        header = fixed + b"".join(fields)
        return header + bytes(padded(len(header), self.alignment) - len(header))


def padded(count: int, alignment: int) -> int:
    """The next multiple of the alignment."""
    return -(-count // alignment) * alignment


def header_size(fields: int, alignment: int) -> int:
    """Bytes before the first tensor, if entries and places of tensors take `fields` bytes."""
    return padded(_FIXED_BYTES + fields, alignment)


def place_bytes(entry: TensorEntry) -> int:
    """Bytes of a tensor's name, shape, type and offset in the header."""
    return len(encode_string(entry.name)) + 4 + 8 * len(entry.shape) + 4 + 8


def raw_entries(file: GgufFile) -> list[RawEntry]:
    """The metadata of a file, in its order."""
    return [RawEntry(key, span.kind, file.data[span.start : span.end].tobytes()) for key, span in file.spans.items()]


def stored_tensors(file: GgufFile) -> tuple[StoredTensor, ...]:
    """The tensors of a file, or of all files of a split model, in their order."""
    parts = file.shards or (file,)
    return tuple(StoredTensor(part.path, entry) for part in parts for entry in part.entries.values())


def write_files(
    files: Sequence[NewFile], *, overwrite: bool, in_place: bool = False, progress: Progress | None = None
) -> None:
    """Write the files; none of them appears before all are complete, and the first appears last.

    Existing targets and a disk that is too small are refused before any work; so are targets that are also sources,
    unless `in_place`.
    """
    check_files(files, overwrite=overwrite, in_place=in_place)
    total, done = sum(file.size for file in files), 0
    with ExitStack() as stack:  # leaves its contexts in reverse order: the last file is renamed first
        temporaries = [stack.enter_context(atomic_path(file.path, overwrite=overwrite)) for file in files]
        for file, temporary in zip(files, temporaries, strict=True):
            before = done

            def report(written: int, before: int = before) -> None:
                if progress is not None:
                    progress(before + written, total)

            _write(temporary, file, report)
            done += file.size


def check_files(files: Sequence[NewFile], *, overwrite: bool, in_place: bool = False) -> None:
    """Raise ConfigError if the files could not be written."""
    sources = {tensor.path.resolve() for file in files for tensor in file.tensors}
    for file in files:
        if file.path.is_dir():
            raise ConfigError(f"{file.path} is a folder: name a file")
        if not in_place and file.path.resolve() in sources:
            raise ConfigError(f"{file.path} is read by this command and cannot be its output: choose another name")
        check_target(file.path, overwrite)
    check_space(files[0].path, sum(file.size for file in files))


def _write(temporary: Path, file: NewFile, report: Callable[[int], None]) -> None:
    buffer = memoryview(bytearray(_BUFFER_BYTES))
    with temporary.open("wb") as target, ExitStack() as stack:
        opened: dict[Path, BinaryIO] = {}
        target.write(file.header())
        for path, entry in file.tensors:
            if path not in opened:
                opened[path] = stack.enter_context(path.open("rb"))
            _copy(opened[path], entry, target, buffer, report)
            target.write(bytes(padded(entry.nbytes, file.alignment) - entry.nbytes))
        size = target.tell()
    report(size)
    written = open_gguf(temporary)  # checks every count, place and size
    if size != file.size or list(written.entries) != [tensor.entry.name for tensor in file.tensors]:
        raise ModelFileError(f"{file.path} has {size} bytes instead of {file.size}: the disk lost a part of it")


def _copy(
    source: BinaryIO, entry: TensorEntry, target: BinaryIO, buffer: memoryview, report: Callable[[int], None]
) -> None:
    source.seek(entry.offset)
    left = entry.nbytes
    while left:
        count = source.readinto(buffer[: min(left, len(buffer))])  # type: ignore[attr-defined]
        if not count:
            raise ModelFileError(
                f"{source.name} ended inside the tensor {entry.name!r}: the file changed while it was read"
            )
        target.write(buffer[:count])
        left -= count
        report(target.tell())


def _place(entry: TensorEntry, offset: int) -> bytes:
    sizes = struct.pack(f"<I{len(entry.shape)}Q", len(entry.shape), *reversed(entry.shape))
    return encode_string(entry.name) + sizes + struct.pack("<IQ", entry.format.ggml_type, offset)
