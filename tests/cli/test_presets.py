"""`--models-preset`: models with options of their own from an INI file."""

from __future__ import annotations

from pathlib import Path

import pytest

from bifolio.cli.options import BatchEngine
from bifolio.cli.presets import read_presets
from bifolio.cli.serve import ServerOptions
from bifolio.cli.serve_several import SeveralOptions
from bifolio.errors import ConfigError
from helpers import tiny_folder


def written(folder: Path, text: str) -> Path:
    path = folder / "models.ini"
    path.write_text(text)
    return path


def test_sections_are_models_with_options_of_their_own(tmp_path: Path) -> None:
    path = written(tmp_path, """
        version = 1
        # a comment
        [*]
        max-num-seqs = 4
        memory = 16MB
        [first]
        model = ./a.gguf ; beside this file
        ctx-size = 4096
        [second]
        m = stories
        parallel = 2
        load-on-startup = true
        """.replace("        ", ""))  # fmt: skip
    first, second = read_presets(path, BatchEngine(threads=3, max_model_len=77))
    assert (first.name, first.reference, first.keep) == ("first", str(tmp_path / "a.gguf"), False)
    assert (first.engine.max_model_len, first.engine.max_num_seqs, first.engine.memory) == (4096, 4, "16MB")
    assert (second.name, second.reference, second.keep) == ("second", "stories", True)
    assert (second.engine.max_model_len, second.engine.max_num_seqs, second.engine.threads) == (77, 2, 3)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "names no model"),
        ("[a]\nthreads = 2\n", "has no model"),
        ("[a]\nmodel = x\nthreds = 2\n", "no option 'threds'"),
        ("[a]\nmodel = x\nmax-model-len = many\n", "max-model-len"),
        ("[a]\nmodel = x\ntemp = 0.5\n", "belongs to requests"),
        ("[a b]\nmodel = x\n", "no spaces"),
        ("model = x\n", "cannot be read"),
        ("[a]\nmodel = x\n[a]\nmodel = y\n", "cannot be read"),
    ],
)
def test_a_wrong_file_is_a_named_error(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as error:
        read_presets(written(tmp_path, text), BatchEngine())
    assert "--models-preset" in str(error.value)


def test_a_file_that_is_not_there_is_a_named_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--models-preset"):
        read_presets(tmp_path / "none.ini", BatchEngine())


def test_presets_and_named_models_share_a_server(tmp_path: Path) -> None:
    path = written(tmp_path, f"[own]\nmodel = {tiny_folder(tokenizer=True)}\nmemory = 8MB\nload-on-startup = yes\n")
    options = SeveralOptions(models_preset=path, models_memory="4GB")
    found = options.settings(["stories"], ServerOptions(), BatchEngine(memory="16MB"))
    assert found is not None
    assert [source.name for source in found.sources] == ["own", "stories"]
    assert found.sources[0].options["memory"] == 8_000_000
    assert found.keep == {"own"}
    clash = SeveralOptions(models_preset=written(tmp_path, "[stories]\nmodel = stories\n"), models_memory="4GB")
    with pytest.raises(ConfigError, match="both called"):
        clash.settings(["stories"], ServerOptions(), BatchEngine())
