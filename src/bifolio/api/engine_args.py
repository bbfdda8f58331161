"""`EngineArgs` of vLLM: the arguments of `LLM` and `AsyncLLM`, kept until one is made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class EngineArgs:
    """Arguments for `AsyncLLM.from_engine_args`."""

    def __init__(self, model: str | Path | None = None, **options: Any) -> None:
        self.model = model
        self.options = options


class AsyncEngineArgs(EngineArgs):
    """The same, under the name that vLLM's asyncio examples use."""
