"""Changes of the metadata of a GGUF file: its tensors are copied as they are.

    --set KEY=VALUE     the type of an existing key stays; a new key needs one
    --remove KEY
    --rename OLD=NEW

A model that opens must open with its new metadata as well, unless the caller allows a broken file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bifolio.errors import BifolioError, ConfigError, did_you_mean
from bifolio.model.gguf.loader import model_of_gguf
from bifolio.model.gguf.new_file import NewFile, RawEntry, raw_entries, stored_tensors
from bifolio.model.gguf.reader import GgufFile, Value, open_gguf, read_metadata
from bifolio.model.gguf.split import SPLIT_KEYS, open_whole_gguf
from bifolio.model.gguf.typed_values import TYPE_NAMES, encode_text, parse_type, type_of

ARCHITECTURE = "general.architecture"
# Keys that every program reads; those that begin with a point follow the name of the architecture.
REQUIRED = (ARCHITECTURE, ".context_length", ".embedding_length", ".block_count", ".feed_forward_length",
            ".attention.head_count", "tokenizer.ggml.model", "tokenizer.ggml.tokens", *SPLIT_KEYS)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Edits:
    """Changes by key."""

    values: Mapping[str, str] = field(default_factory=dict)  # key: new value, as text
    removed: Sequence[str] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)  # old key: new key
    types: Mapping[str, str] = field(default_factory=dict)  # key: name of its type
    new_type: str | None = None  # of new keys that `types` does not list


class Change(NamedTuple):
    """One changed key, for a report; None stands for a key that does not exist."""

    key: str
    new_key: str | None
    old_value: Value | None
    new_value: Value | None
    type: str


def plan_edit(path: Path, target: Path, edits: Edits, *, allow_broken: bool = False) -> tuple[NewFile, list[Change]]:
    """The file with its changes; ConfigError if a change cannot be made, or would break the model."""
    file = open_gguf(path)
    entries = {entry.key: entry for entry in raw_entries(file)}
    _check_keys(entries, edits)
    changed = [_edited(entry, edits) for entry in entries.values() if entry.key not in edits.removed]
    changed += [_new_entry(key, text, edits) for key, text in edits.values.items() if key not in entries]
    new = NewFile(target, tuple(changed), stored_tensors(file))
    header = np.frombuffer(replace(new, tensors=()).header(), np.uint8)
    metadata = read_metadata(path, header)
    if not allow_broken:
        _refuse_broken(file, edits, metadata)
    return new, _changes(file, edits, metadata, {entry.key: entry for entry in changed})


def _check_keys(entries: Mapping[str, RawEntry], edits: Edits) -> None:
    """Refuse keys that do not exist, that stand in two options, or that would exist twice."""
    touched = [*edits.removed, *edits.renamed, *edits.renamed.values(), *edits.values]
    if not touched:
        raise ConfigError("there is nothing to change: pass --set, --set-file, --remove or --rename")
    if twice := [key for key in touched if touched.count(key) > 1]:
        raise ConfigError(f"{twice[0]} stands in two options: change a key once")
    for key in (*edits.removed, *edits.renamed):
        if key not in entries:
            raise ConfigError(f"the file has no key {key!r}{did_you_mean(key, entries)}")
    for key in edits.renamed.values():
        if key in entries:
            raise ConfigError(f"the file has a key {key!r} already: remove it first, or choose another name")
    for key in edits.types:
        if key not in edits.values:
            raise ConfigError(f"--type names {key}, which no --set changes")


def _edited(entry: RawEntry, edits: Edits) -> RawEntry:
    key = entry.key
    if key in edits.renamed:
        return entry._replace(key=edits.renamed[key])
    if key not in edits.values:
        return entry
    type = parse_type(edits.types[key]) if key in edits.types else type_of(entry.kind, entry.value)
    return RawEntry(key, type.kind, encode_text(edits.values[key], type, key))


def _new_entry(key: str, text: str, edits: Edits) -> RawEntry:
    name = edits.types.get(key, edits.new_type)
    if name is None:
        raise ConfigError(f"the file has no key {key!r} yet: pass --type with one of {', '.join(TYPE_NAMES)}")
    type = parse_type(name)
    return RawEntry(key, type.kind, encode_text(text, type, key))


def _refuse_broken(file: GgufFile, edits: Edits, metadata: Mapping[str, Value]) -> None:
    """Raise ConfigError if a required key goes, or if the model opens now and would not with the new metadata."""
    prefix = file.metadata.get(ARCHITECTURE, "")
    required = {f"{prefix}{key}" if key.startswith(".") else key for key in REQUIRED}
    lost = [key for key in (*edits.removed, *edits.renamed) if key in required]
    lost += [key for key in edits.values if key in SPLIT_KEYS]
    if lost:
        raise ConfigError(f"programs that read the file need {lost[0]}: pass --allow-broken to change it nevertheless")
    try:
        used = _used_tensors(file, file.metadata)
    except BifolioError:  # of a kind that bifolio does not run: the values cannot be checked
        if metadata.get(ARCHITECTURE) != prefix:
            raise ConfigError(
                f"{ARCHITECTURE} names the other keys: pass --allow-broken to change it nevertheless"
            ) from None
        return
    try:
        unused = sorted(used - _used_tensors(file, metadata))
    except BifolioError as error:
        raise ConfigError(
            f"with these changes the model would not open: {error}: pass --allow-broken to write it nevertheless"
        ) from error
    if unused:
        raise ConfigError(
            f"with these changes the model would leave {len(unused)} of its tensors unused, such as {unused[0]}: pass "
            "--allow-broken to write it nevertheless"
        )


def _used_tensors(file: GgufFile, metadata: Mapping[str, Value]) -> set[str]:
    """The tensors that the model reads with this metadata; an error if it does not open. No weight is read."""
    model = model_of_gguf(replace(open_whole_gguf(file.path), metadata=dict(metadata)))
    _ = model.text.tokenizer
    return {view.name for view in model.views()}


def _changes(
    file: GgufFile, edits: Edits, metadata: Mapping[str, Value], entries: Mapping[str, RawEntry]
) -> list[Change]:
    def type_name(key: str) -> str:
        entry = entries[key]
        return str(type_of(entry.kind, entry.value))

    old = file.metadata
    changes = [
        Change(key, None, old[key], None, str(type_of(s.kind, file.data[s.start : s.end].tobytes())))
        for key in edits.removed
        for s in (file.spans[key],)
    ]
    changes += [Change(key, new, old[key], old[key], type_name(new)) for key, new in edits.renamed.items()]
    return changes + [Change(key, key, old.get(key), metadata[key], type_name(key)) for key in edits.values]
