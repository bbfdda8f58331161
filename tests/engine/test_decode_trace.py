"""A decode step on the CPU stays readable: it passes through few files."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import bifolio
from bifolio import LLM, SamplingParams
from helpers import tiny_folder

MOST_FILES = 16


def test_a_decode_step_passes_through_few_files() -> None:
    pytest.importorskip("bifolio.kernels._native")
    engine = LLM(tiny_folder(tokenizer=True), threads=1, kernels="native", max_model_len=64).engine
    engine.add_request("a", [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
    for _ in range(3):
        engine.step()
    root, files = Path(bifolio.__file__).parent, set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(root):
            files.add(path.relative_to(root).as_posix())

    sys.setprofile(note)
    try:
        engine.step()
    finally:
        sys.setprofile(None)
    assert {"engine/engine.py", "engine/executor.py", "kernels/native/program.py"} <= files
    assert len(files) <= MOST_FILES, sorted(files)
