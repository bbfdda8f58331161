"""Models known by name: those shipped inside the package, and those the user pulled into the cache."""

from __future__ import annotations

import os
from pathlib import Path

DEFAULT_MODEL = "stories"


def embedded_dir() -> Path:
    return Path(__file__).resolve().parent.parent / "models"


def cache_dir() -> Path:
    """Where pulled models lie: $BIFOLIO_CACHE, or the user's cache folder."""
    if override := os.environ.get("BIFOLIO_CACHE"):
        return Path(override).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "bifolio"


def find_model(name: str) -> Path | None:
    for folder in (embedded_dir(), cache_dir() / "models"):
        for candidate in (folder / f"{name}.gguf", folder / name):
            if candidate.exists():
                return candidate
    return None


def known_names() -> list[str]:
    names = set()
    for folder in (embedded_dir(), cache_dir() / "models"):
        if folder.is_dir():
            names |= {path.stem for path in folder.glob("*.gguf")}
            names |= {path.name for path in folder.iterdir() if path.is_dir() and (path / "config.json").is_file()}
    return sorted(names)
