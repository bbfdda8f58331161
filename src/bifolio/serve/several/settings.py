"""The models of a server, and the bytes that each of them takes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bifolio.errors import BifolioError, ConfigError
from bifolio.model.loader import open_text_model
from bifolio.serve.http.context import public_name

PROCESS_BYTES = 320 << 20  # of the engine's process and the helpers of its front end, beside weights and cache
DEVICE_BYTES = 2 << 30  # of a process on a GPU beside weights and cache: context, captured graphs, buffers of a step
CACHE_BYTES = 1 << 30  # of each model's cache, where `memory` is not given
SPLIT = re.compile(r"(.*)-\d{5}-of-\d{5}\.gguf")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that may be started."""

    name: str  # as clients see it
    reference: str
    num_bytes: int  # of weights, cache and processes
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)  # of its engine, where they are its own
    asleep_bytes: int = 0  # of `num_bytes`, that stay while it sleeps
    host_bytes: int = 0  # of weights that sleep


@dataclass(frozen=True, slots=True)
class SeveralModels:
    """The models of a server and the limits on them."""

    sources: tuple[ModelSource, ...]
    max_bytes: int
    cache_bytes: int  # of each model
    keep: frozenset[str] = frozenset()  # names of models that are never evicted
    keep_alive: float | None = None  # seconds after its last request until a model is unloaded; None: until evicted
    wait_seconds: float = 120.0  # that a request waits for its model, at most
    sleep_bytes: int = 0  # of host memory for the weights of evicted models; 0: their processes end

    def __post_init__(self) -> None:
        names = {source.name for source in self.sources}
        for name in sorted(self.keep - names):
            raise ConfigError(f"--keep {name!r} names no model of this server: it has {', '.join(sorted(names))}")
        kept = sum(source.num_bytes for source in self.sources if source.name in self.keep)
        for source in self.sources:
            needed = source.num_bytes + (0 if source.name in self.keep else kept)
            if needed > self.max_bytes:
                raise ConfigError(
                    f"{source.name!r} needs {needed >> 20} MiB with the models of --keep, and --models-memory is "
                    f"{self.max_bytes >> 20} MiB: raise it, or pass a smaller --memory for the caches"
                )


def find_models(
    references: Sequence[str],
    folder: Path | None,
    cache_bytes: int,
    presets: Sequence[ModelSource] = (),
    *,
    on_device: bool = False,
) -> tuple[ModelSource, ...]:
    """The named models, those of presets, and those in a folder; names must differ."""
    wanted = [*references, *([] if folder is None else _in_folder(folder))]
    sources = {source.name: source for source in presets}
    for reference in wanted:
        name = public_name(reference, None)
        if name in sources:
            other = sources[name].reference
            raise ConfigError(f"{reference!r} and {other!r} are both called {name!r}: rename one of them")
        sources[name] = model_source(name, reference, cache_bytes, on_device=on_device)
    if not sources:
        raise ConfigError(f"--models-dir {str(folder)!r} holds no .gguf file and no model folder: pass another")
    return tuple(sources.values())


def model_source(
    name: str,
    reference: str,
    cache_bytes: int,
    options: Mapping[str, Any] | None = None,
    *,
    on_device: bool = False,
) -> ModelSource:
    """A model with the bytes that it takes, of the host or of a GPU."""
    weights = file_bytes(open_text_model(reference).path)
    others = DEVICE_BYTES if on_device else PROCESS_BYTES
    stays = others if on_device else others + weights  # asleep: on a CPU weights stay where they are
    return ModelSource(name, reference, weights + cache_bytes + others, options or {}, stays, weights)


def _in_folder(folder: Path) -> list[str]:
    """The models in a folder that can be read; others are left out."""
    try:
        entries = sorted(folder.expanduser().iterdir())
    except OSError as error:
        raise ConfigError(f"--models-dir {str(folder)!r} cannot be read ({error.strerror})") from error
    return [str(path) for path in entries if _is_model(path)]


def _is_model(path: Path) -> bool:
    split = SPLIT.fullmatch(path.name)
    if split is not None and not path.name.startswith(f"{split[1]}-00001-of-"):
        return False
    if not (path.suffix == ".gguf" or (path / "config.json").is_file()):
        return False
    try:
        open_text_model(str(path))
    except BifolioError:
        return False
    return True


def file_bytes(path: Path) -> int:
    """The bytes of a model's weights in files: about those that its engine maps."""
    return sum(file.stat().st_size for file in _weight_files(path))


def _weight_files(path: Path) -> Iterable[Path]:
    if path.is_dir():
        return [*path.glob("*.safetensors"), *path.glob("*.gguf")]
    split = SPLIT.fullmatch(path.name)
    return [path] if split is None else path.parent.glob(f"{split[1]}-*-of-*.gguf")
