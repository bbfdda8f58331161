"""Training of language models: `train(TrainSettings(data=("book.txt",)))`, or `bifolio train` on the command line.

Training needs torch. Names are imported on first use, so that reading the settings does not import it.
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
