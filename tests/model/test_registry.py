"""Models by name: embedded ones first, then those in the cache."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from bifolio.errors import ModelFileError
from bifolio.folders import cache_dir
from bifolio.model import registry
from bifolio.model.loader import load_model, resolve
from bifolio.model.registry import embedded_dir, find_model, known_names, list_models, pulled_dir
from helpers import tiny_folder

EMBEDDED = ["shakespeare", "stories", "stories-draft"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BIFOLIO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def put(name: str, source: str | None = None) -> Path:
    """A small model as `pull` would leave it."""
    pulled_dir().mkdir(parents=True, exist_ok=True)
    path = pulled_dir() / f"{name}.gguf"
    shutil.copy(embedded_dir() / "stories-draft.gguf", path)
    if source is not None:
        (pulled_dir() / f"{name}.source.json").write_text(json.dumps({"source": source}))
    return path


def test_where_the_cache_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_dir() == tmp_path / "cache"
    monkeypatch.delenv("BIFOLIO_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_dir() == Path("/somewhere/bifolio")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: Path("/home/me"))
    assert cache_dir() == Path("/home/me/.cache/bifolio")


def test_names_of_embedded_and_pulled_models(cache: Path) -> None:
    assert known_names() == EMBEDDED
    put("Qwen2.5-0.5B.Q4_K_M")
    shutil.copytree(tiny_folder(), pulled_dir() / "net")
    (pulled_dir() / "no-model").mkdir()
    (pulled_dir() / ".half.gguf.partial").write_bytes(b"GGUF")
    assert known_names() == sorted([*EMBEDDED, "Qwen2.5-0.5B.Q4_K_M", "net"])
    assert resolve("Qwen2.5-0.5B.Q4_K_M") == pulled_dir() / "Qwen2.5-0.5B.Q4_K_M.gguf"  # a name may hold dots
    assert load_model("net").config.hidden_size == load_model(tiny_folder()).config.hidden_size


def test_a_model_is_found_by_what_it_was_pulled_from() -> None:
    path = put("tiny", "hf:org/name:tiny.gguf")
    assert find_model("hf:org/name:tiny.gguf") == find_model("tiny") == path
    assert find_model("hf:org/name") is None


@pytest.mark.parametrize("name", ["../models/stories", "..", ".", "", "a\\b", "/etc", "hf:../x"])
def test_names_do_not_lead_out_of_the_folders(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "embedded_dir", lambda: embedded_dir())
    assert find_model(name) is None


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ModelFileError, match="stories-draft"):
        load_model("xylophone")
    with pytest.raises(ModelFileError, match="did you mean 'stories'"):
        load_model("storys")


def test_what_the_list_says() -> None:
    put("tiny", "hf:org/name")
    (pulled_dir() / "broken.gguf").write_bytes(b"GGUF" + bytes(20))
    shutil.copytree(tiny_folder(), pulled_dir() / "net")
    entries = {entry.name: entry for entry in list_models()}
    assert list(entries) == [*sorted(EMBEDDED, key=lambda name: name + ".gguf"), "broken", "net", "tiny"]
    stories = entries["stories"]
    assert (stories.origin, stories.architecture, stories.format) == ("embedded", "llama", "Q8_0")
    assert stories.num_parameters == 14_555_520
    assert stories.size == stories.path.stat().st_size
    assert (entries["tiny"].origin, entries["tiny"].source) == ("pulled", "hf:org/name")
    assert entries["net"].format == "F32"
    assert entries["net"].size >= (pulled_dir() / "net" / "model.safetensors").stat().st_size
    assert entries["broken"].problem is not None
    assert entries["broken"].num_parameters is None
