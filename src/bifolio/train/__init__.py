"""Training language models: `train(TrainSettings(data=("book.txt",)))`, or `bifolio train` on the command line.

Needs torch; the names are imported when they are first used, so that looking at the settings does not.
"""

from __future__ import annotations

from typing import Any

__all__ = ["TrainResult", "TrainSettings", "train"]


def __getattr__(name: str) -> Any:
    if name == "TrainSettings":
        from bifolio.train.settings import TrainSettings

        return TrainSettings
    if name in ("TrainResult", "train"):
        from bifolio.train import loop

        return getattr(loop, name)
    raise AttributeError(f"module 'bifolio.train' has no attribute {name!r}")
