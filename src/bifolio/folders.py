"""Folders of the user that the package writes to."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """The folder of pulled models and compiled kernels: $BIFOLIO_CACHE, or in the user's cache folder."""
    if override := os.environ.get("BIFOLIO_CACHE"):
        return Path(override).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "bifolio"
