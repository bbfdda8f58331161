"""Models known by name: embedded in the package, or pulled into the cache.

src/bifolio/models/stories.gguf          embedded
$BIFOLIO_CACHE/models/smollm2.gguf       pulled, with smollm2.source.json beside it
$BIFOLIO_CACHE/models/SmolLM2-135M/      pulled, a folder with config.json
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Literal

from bifolio.errors import BifolioError
from bifolio.folders import cache_dir
from bifolio.model.references import KNOWN, PACKAGED, normalised

DEFAULT_MODEL = "stories"
PULLABLE = ("smollm2", *KNOWN)  # names accepted by `bifolio pull`
SOURCE_SUFFIX = ".source.json"
_END_BYTES = 1 << 20

Origin = Literal["embedded", "pulled"]


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A named model as described by its header; `problem` is the reason if it cannot be read."""

    name: str
    origin: Origin
    path: Path
    size: int  # bytes on disk
    architecture: str | None = None
    num_parameters: int | None = None
    format: str | None = None  # of most of the weights, by bytes
    source: str | None = None  # the reference it was pulled from
    problem: str | None = None


def embedded_dir() -> Path:
    return Path(__file__).resolve().parent.parent / "models"


def pulled_dir() -> Path:
    return cache_dir() / "models"


def find_model(name: str) -> Path | None:
    """The path of a model by its name, or by the reference (`hf:org/name`) it was pulled from."""
    if not _is_plain(name):
        return _find_by_source(normalised(name) or name)
    for folder in (embedded_dir(), pulled_dir()):
        for candidate in (folder / f"{name}.gguf", folder / name):
            if candidate.exists():
                return candidate
    return None


def known_names() -> list[str]:
    return sorted({name for name, _, _ in _found()})


def list_models() -> list[ModelEntry]:
    """List all models, embedded ones first; only headers are read."""
    return [describe(name, origin, path) for name, origin, path in _found()]


def describe(name: str, origin: Origin, path: Path) -> ModelEntry:
    """Describe a model by its header; an unreadable one is listed with the reason."""
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) if path.is_dir() else _size(path)
    source = pulled_source(name) if origin == "pulled" else None
    try:
        architecture, num_parameters, format = header(path)
    except BifolioError as error:
        return ModelEntry(name, origin, path, size, source=source, problem=str(error))
    return ModelEntry(name, origin, path, size, architecture, num_parameters, format, source)


def pulled_source(name: str) -> str | None:
    """The recorded source of the pulled model `name`."""
    source = _pulled_record(name).get("source")
    return source if isinstance(source, str) else None


def recommended_defaults(path: Path) -> dict[str, float]:
    """The sampling defaults recorded for a pulled model, or for one with the same bytes; {} for other files."""
    if path.parent.parent == pulled_dir():  # a part of a model in several files
        path = path.parent
    if path.parent == pulled_dir() and _record_of(path):
        return _recorded_defaults(path)
    return _defaults_of_copy(path) if path.is_file() else {}


def ends_digest(path: Path) -> str:
    """SHA-256 of a file's size, first MiB (the header) and last MiB: milliseconds for a file of any size."""
    size = _size(path)
    with path.open("rb") as file:
        first = file.read(_END_BYTES)
        file.seek(max(size - _END_BYTES, 0))
        return sha256(size.to_bytes(8, "little") + first + file.read()).hexdigest()


def _defaults_of_copy(path: Path) -> dict[str, float]:
    digest = ends_digest(path)
    for model in PACKAGED.values():
        if model.ends == digest:
            return dict(model.generation_config)
    pulled = pulled_dir().glob("*.gguf") if pulled_dir().is_dir() else ()
    same = (other for other in sorted(pulled) if _size(other) == _size(path) and ends_digest(other) == digest)
    return next((_recorded_defaults(other) for other in same), {})


def _recorded_defaults(path: Path) -> dict[str, float]:
    found = _record_of(path).get("generation_config")
    if not isinstance(found, dict):
        return {}
    return {name: value for name, value in found.items() if isinstance(value, int | float)}


def _record_of(path: Path) -> dict[str, object]:
    return _pulled_record(path.stem if path.suffix == ".gguf" else path.name)


def _pulled_record(name: str) -> dict[str, object]:
    try:
        record = json.loads((pulled_dir() / (name + SOURCE_SUFFIX)).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _is_plain(name: str) -> bool:
    """Whether it is a plain file name; other strings could point outside the model folders."""
    return not any(sign in name for sign in "/\\:") and name not in ("", ".", "..")


def _found() -> Iterator[tuple[str, Origin, Path]]:
    folders: tuple[tuple[Origin, Path], ...] = (("embedded", embedded_dir()), ("pulled", pulled_dir()))
    for origin, folder in folders:
        if not folder.is_dir():
            continue
        for path in sorted(folder.iterdir()):
            if path.name.startswith("."):  # incomplete files of another process
                continue
            if path.suffix == ".gguf" and path.is_file():
                yield path.stem, origin, path
            elif (path / "config.json").is_file() or next(path.glob("*.gguf"), None) is not None:
                yield path.name, origin, path


def _find_by_source(reference: str) -> Path | None:
    return next(
        (path for name, origin, path in _found() if origin == "pulled" and pulled_source(name) == reference), None
    )


def _size(path: Path) -> int:
    return path.stat().st_size


def header(path: Path) -> tuple[str, int, str]:
    """(architecture, parameters, format of most of the weights)."""
    formats: dict[str, int] = {}
    if path.is_dir() and not (path / "config.json").exists():
        from bifolio.model.gguf.split import only_gguf

        path = only_gguf(path) or path
    if path.is_dir():
        from bifolio.model.huggingface.config import config_from_hf
        from bifolio.model.huggingface.hf_loader import folder_tensors, read_json

        raw = read_json(path / "config.json")
        tensors = folder_tensors(path, raw)
        config = config_from_hf(raw, path / "config.json")
        sizes = [(tensor.format, tensor.nbytes) for tensor in tensors.stored()]
    else:
        from bifolio.model.gguf.loader import config_from_gguf
        from bifolio.model.gguf.split import open_whole_gguf

        file = open_whole_gguf(path)
        config = config_from_gguf(file)
        sizes = [(entry.format.name, entry.nbytes) for entry in file.entries.values()]
    for name, nbytes in sizes:
        formats[name] = formats.get(name, 0) + nbytes
    return config.architecture, config.num_parameters, max(formats, key=lambda name: formats[name], default="none")
