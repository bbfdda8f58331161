"""scripts/walk-docs goes through every page, and every block that it leaves out says why."""

from __future__ import annotations

import importlib.util
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest
from doc_blocks import ROOT, blocks_of, documents, walked_pages
from doc_walk import PageWalk


def script() -> ModuleType:
    loader = SourceFileLoader("walk_docs", str(ROOT / "scripts" / "walk-docs"))
    spec = importlib.util.spec_from_loader("walk_docs", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_the_walk_has_every_block_of_every_page_once() -> None:
    walked = [
        block.name for _, blocks, _ in script().steps([]) for block in blocks if block.kind in ("shell", "python")
    ]
    pages = [(path.relative_to(ROOT).as_posix(), path.read_text("utf-8")) for path in documents()]
    code = [block.name for name, text in pages for block in blocks_of(text, name) if block.kind in ("shell", "python")]
    assert sorted(walked) == sorted(code)
    assert len(code) > 80


def test_a_part_of_the_pages_can_be_chosen() -> None:
    names = [name for name, _, _ in script().steps(["tutorials"])]
    assert names
    assert all("tutorials" in name for name in names)


def test_the_real_model_answers_as_the_tutorial_shows(tmp_path: Path, models_dir: Path) -> None:
    """Greedy answers of SmolLM2 that a page shows are those of this version, on every instruction set."""
    file = models_dir / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not file.is_file():
        pytest.skip(f"{file} is absent")
    (tmp_path / "cache" / "models").mkdir(parents=True)
    (tmp_path / "cache" / "models" / "smollm2.gguf").symlink_to(file)
    conversation = [block for block in walked_pages()["docs/tutorials/chat.md"] if block.kind == "session"]
    assert conversation
    with PageWalk(tmp_path, models=tmp_path / "cache") as page:
        page.walk(conversation)
