"""Models in several GGUF files open as one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bifolio.errors import ModelFileError
from bifolio.model.gguf.split import only_gguf, open_whole_gguf, whole_name
from bifolio.model.loader import load_model
from exotic_weights import k_quant_llama
from gguf_parts import split


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return k_quant_llama(tmp_path / "whole.gguf")


@pytest.mark.parametrize("opened", [0, 2])
def test_the_parts_hold_the_model(whole: Path, opened: int) -> None:
    paths = split(whole, 3)
    expected, found = load_model(whole).weights, load_model(paths[opened]).weights
    assert found.formats() == expected.formats()
    for left, right in zip(found.matrices(), expected.matrices(), strict=True):
        assert np.array_equal(left.data, right.data)  # type: ignore[union-attr]
    assert open_whole_gguf(whole).shards == ()


def test_a_missing_part_is_named(whole: Path) -> None:
    paths = split(whole, 3)
    paths[1].unlink()
    with pytest.raises(ModelFileError, match=r"part-00002-of-00003\.gguf does not exist, part 2 of 3"):
        load_model(paths[0])


def test_a_part_of_another_name_is_refused(whole: Path) -> None:
    paths = split(whole, 2)
    renamed = paths[0].rename(whole.with_name("model.gguf"))
    with pytest.raises(ModelFileError, match=r"one of 2 files of a model and must be called NAME-00001-of-00002\.gguf"):
        load_model(renamed)


def test_parts_in_the_wrong_order_are_refused(whole: Path) -> None:
    first, second = split(whole, 2)
    aside = first.rename(whole.with_name("aside"))
    second.rename(first)
    aside.rename(second)
    with pytest.raises(ModelFileError, match="says that it is part 1 of 2 where its name says 0 of 2"):
        load_model(first)


def test_a_lost_tensor_is_found(whole: Path) -> None:
    paths = split(whole, 2, total=99)
    with pytest.raises(ModelFileError, match="different tensors where the model has 99"):
        load_model(paths[0])


def test_a_folder_with_one_model_is_that_model(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "several").mkdir()
    for path in split(whole, 3):
        path.rename(tmp_path / "several" / path.name)
    theirs = load_model(whole).weights.embedding.dequantize()  # type: ignore[union-attr]
    assert np.array_equal(load_model(tmp_path / "several").weights.embedding.dequantize(), theirs)  # type: ignore[union-attr]
    (tmp_path / "several" / "mmproj-F16.gguf").write_bytes(b"the part of a model that reads images")
    assert load_model(tmp_path / "several").config == load_model(whole).config
    (tmp_path / "several" / "other.gguf").write_bytes(whole.read_bytes())
    with pytest.raises(ModelFileError, match=r"several models: pass one of other\.gguf, part-00001-of-00003\.gguf"):
        load_model(tmp_path / "several")
    (tmp_path / "empty").mkdir()
    assert only_gguf(tmp_path / "empty") is None
    assert whole_name("a/b-00002-of-00003.gguf") == ("a/b.gguf", 2)
    assert whole_name("a/b.gguf") == ("a/b.gguf", 1)
