"""Cut a GGUF file into parts that llama.cpp and bifolio open as one model, and join such parts again.

    NAME-00001-of-00003.gguf   |metadata, split.no = 0|tensors ...|
    NAME-00002-of-00003.gguf   |split.no = 1|tensors ...|
    NAME-00003-of-00003.gguf   |split.no = 2|tensors ...|

Every part also has `split.count` and `split.tensors.count`. Joined parts are the file that was cut, without these keys.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from bifolio.errors import ConfigError
from bifolio.model.gguf.new_file import (
    NewFile,
    RawEntry,
    StoredTensor,
    header_size,
    padded,
    place_bytes,
    raw_entries,
    stored_tensors,
)
from bifolio.model.gguf.reader import GgufFile
from bifolio.model.gguf.split import MAX_FILES, SPLIT_KEYS, part_name, whole_name
from bifolio.model.gguf.typed_values import encode_number

DEFAULT_TENSORS = 128  # in one part, where the caller sets no limit


def plan_split(
    file: GgufFile,
    prefix: Path | None = None,
    *,
    max_bytes: int | None = None,
    max_tensors: int | None = None,
    metadata_alone: bool = False,
) -> list[NewFile]:
    """The parts of a model, each at most `max_bytes` long, header included, and with at most `max_tensors` tensors.

    `prefix` is the path of the parts without `-00001-of-00003.gguf`. With `metadata_alone` the first part has no
    tensors.
    """
    if prefix is None:
        prefix = file.path.with_name(whole_name(file.path.name)[0])
    stem = prefix.name.removesuffix(".gguf")
    if max_bytes is None and max_tensors is None:
        max_tensors = DEFAULT_TENSORS
    entries, tensors = _model_entries(file), stored_tensors(file)
    groups = _Groups(entries, len(tensors), max_bytes, max_tensors, metadata_alone)
    for tensor in tensors:
        groups.add(tensor)
    count = len(groups.parts)
    if count > MAX_FILES:
        raise ConfigError(f"the limits make {count} files, more than {MAX_FILES}: raise them")
    return [
        NewFile(
            prefix.with_name(part_name(stem, number, count)),
            (*(entries if number == 0 else ()), *_split_entries(number, count, len(tensors))),
            tuple(part),
        )
        for number, part in enumerate(groups.parts)
    ]


def plan_merge(file: GgufFile, target: Path) -> NewFile:
    """The parts of a split model in one file; `file` is opened by `open_whole_gguf`."""
    count = file.metadata.get("split.count", 0)
    if not isinstance(count, int) or count < 1:
        raise ConfigError(f"{file.path} is a whole model: pass the first of several parts, NAME-00001-of-00003.gguf")
    return NewFile(target, tuple(_model_entries(file)), stored_tensors(file))


def _model_entries(file: GgufFile) -> list[RawEntry]:
    """The metadata of the model, without those of its parts."""
    first = file.shards[0] if file.shards else file
    return [entry for entry in raw_entries(first) if entry.key not in SPLIT_KEYS]


def _split_entries(number: int, count: int, num_tensors: int) -> tuple[RawEntry, ...]:
    """The keys of a part with the types that llama.cpp reads, in its order."""
    return (
        RawEntry("split.no", *encode_number(number, "u16")),
        RawEntry("split.tensors.count", *encode_number(num_tensors, "i32")),
        RawEntry("split.count", *encode_number(count, "u16")),
    )


class _Groups:
    """Tensors in parts, in their order; each part is filled before the next one begins."""

    def __init__(
        self,
        entries: Iterable[RawEntry],
        num_tensors: int,
        max_bytes: int | None,
        max_tensors: int | None,
        metadata_alone: bool,
    ) -> None:
        self.parts: list[list[StoredTensor]] = [[]]
        self._max_bytes, self._max_tensors = max_bytes, max_tensors
        self._tail = _split_entries(0, 1, num_tensors)
        self._begin(tuple(entries))
        if max_bytes is not None and self._size() > max_bytes:
            raise ConfigError(f"the metadata take {self._size()} bytes, more than --max-size {max_bytes}: raise it")
        if metadata_alone:
            self._next()

    def add(self, tensor: StoredTensor) -> None:
        if self._is_full(tensor):
            self._next()
            if self._is_full(tensor):
                needed = self._size_with(tensor)
                raise ConfigError(
                    f"the tensor {tensor.entry.name!r} takes {needed} bytes in a file of its own, more than "
                    f"--max-size {self._max_bytes}: raise it"
                )
        self._fields += place_bytes(tensor.entry)
        self._data += padded(tensor.entry.nbytes, self._alignment)
        self.parts[-1].append(tensor)

    def _begin(self, entries: tuple[RawEntry, ...]) -> None:
        empty = NewFile(Path(), (*entries, *self._tail), ())
        self._alignment = empty.alignment
        self._fields = sum(entry.nbytes for entry in empty.entries)  # bytes of the header that grows with tensors
        self._data = 0

    def _next(self) -> None:
        self.parts.append([])
        self._begin(())

    def _is_full(self, tensor: StoredTensor) -> bool:
        too_many = self._max_tensors is not None and len(self.parts[-1]) >= self._max_tensors
        return too_many or (self._max_bytes is not None and self._size_with(tensor) > self._max_bytes)

    def _size_with(self, tensor: StoredTensor) -> int:
        return self._size(place_bytes(tensor.entry)) + padded(tensor.entry.nbytes, self._alignment)

    def _size(self, more_fields: int = 0) -> int:
        return header_size(self._fields + more_fields, self._alignment) + self._data
