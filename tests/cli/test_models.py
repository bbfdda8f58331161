"""`bifolio models` from the outside."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from bifolio.cli.main import build_app
from bifolio.model.registry import embedded_dir, pulled_dir
from cli_runner import CliRunner


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIFOLIO_CACHE", str(tmp_path))


def bifolio(*arguments: str) -> str:
    result = CliRunner().invoke(build_app(), list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_table_names_everything_and_cuts_nothing() -> None:
    lines = bifolio("models").splitlines()
    assert lines[0].split() == ["name", "from", "architecture", "parameters", "format", "size", "path"]
    stories = next(line for line in lines if line.startswith("stories (default)"))
    for word in ("embedded", "llama", "14.6 M", "Q8_0", "15.6 MB", str(embedded_dir() / "stories.gguf")):
        assert word in stories
    assert lines[-1] == "more: bifolio pull smollm2"


def test_pulled_and_broken_models() -> None:
    pulled_dir().mkdir(parents=True)
    shutil.copy(embedded_dir() / "shakespeare.gguf", pulled_dir() / "bard.gguf")
    (pulled_dir() / "bard.source.json").write_text('{"source": "hf:a/b"}')
    (pulled_dir() / "broken.gguf").write_bytes(b"nothing")
    printed = bifolio("models")
    assert "hf:a/b" in printed
    assert "broken cannot be used: " in printed
    records = {record["name"]: record for record in json.loads(bifolio("models", "--json"))}
    assert records["bard"]["num_parameters"] == records["shakespeare"]["num_parameters"] == 1_598_080
    assert records["broken"]["problem"]
    assert Path(records["bard"]["path"]) == pulled_dir() / "bard.gguf"
