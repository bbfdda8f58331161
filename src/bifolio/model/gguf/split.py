"""Models in several GGUF files, `NAME-00001-of-00003.gguf` and so on, opened as one.

Every file has a header of its own. The first holds the metadata of the model; each lists its own tensors, and says with
`split.no`, `split.count` and `split.tensors.count` which part of the model it is.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from bifolio.errors import ModelFileError
from bifolio.model.gguf.reader import GgufFile, open_gguf

SPLIT_KEYS = ("split.no", "split.count", "split.tensors.count")
MAX_FILES = 10_000
_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)


def whole_name(path: str) -> tuple[str, int]:
    """(Name without the number of the part, number of the part); files of whole models are their own part 1."""
    named = _NAME.fullmatch(path)
    return (f"{named['stem']}.gguf", int(named["number"])) if named else (path, 1)


def part_name(stem: str, number: int, count: int) -> str:
    """The name of a part, counted from 0, as llama.cpp writes it: `NAME-00001-of-00003.gguf`."""
    return f"{stem}-{number + 1:05d}-of-{count:05d}.gguf"


def is_projector(path: str) -> bool:
    """Whether a file holds the part of a model that reads images, which llama.cpp keeps beside the model."""
    return "mmproj" in Path(path).name.lower()


def only_gguf(folder: Path) -> Path | None:
    """The file, or the first part, of the one model in a folder of GGUF files; None if there is no such file."""
    models = [path for path in sorted(folder.glob("*.gguf")) if not is_projector(path.name)]
    found = [path for path in models if whole_name(path.name)[1] == 1]
    if len(found) > 1:
        raise ModelFileError(
            f"{folder} holds several models: pass one of {', '.join(path.name for path in found)} with its folder"
        )
    return found[0] if found else None


def open_whole_gguf(path: str | Path) -> GgufFile:
    """Check the header of `path`, and of the files beside it that hold the rest of a split model, and map them."""
    path = Path(path)
    file = open_gguf(path)
    count = file.metadata.get("split.count", 0)
    if not isinstance(count, int) or count <= 1:
        return file
    named = _NAME.fullmatch(path.name)
    if named is None or int(named["count"]) != count or count > MAX_FILES:
        raise ModelFileError(
            f"{path} is one of {count} files of a model and must be called NAME-00001-of-{count:05d}.gguf: "
            "give all files the names they were made with"
        )
    paths = [path.with_name(part_name(named["stem"], number, count)) for number in range(count)]
    return _joined(paths, count)


def _joined(paths: list[Path], count: int) -> GgufFile:
    shards = []
    for number, path in enumerate(paths):
        if not path.exists():
            raise ModelFileError(
                f"{path} does not exist, part {number + 1} of {count} of a model: fetch the whole model"
            )
        shard = open_gguf(path)
        found = shard.metadata.get("split.no"), shard.metadata.get("split.count")
        if found != (number, count):
            raise ModelFileError(
                f"{path} says that it is part {found[0]!r} of {found[1]!r} where its name says {number} of {count} "
                "(counted from 0): fetch the whole model again"
            )
        shards.append(shard)
    entries = {name: entry for shard in shards for name, entry in shard.entries.items()}
    total = shards[0].metadata.get("split.tensors.count", len(entries))
    if len(entries) != sum(len(shard.entries) for shard in shards) or len(entries) != total:
        raise ModelFileError(
            f"{paths[0]}: the {count} files hold {len(entries)} different tensors where the model has {total}: "
            "fetch the whole model again"
        )
    return replace(shards[0], entries=entries, shards=tuple(shards))
