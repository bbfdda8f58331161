"""Models in several GGUF files open as one."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from bifolio.errors import ModelFileError
from bifolio.model.gguf.reader import open_gguf
from bifolio.model.gguf.split import open_whole_gguf
from bifolio.model.loader import load_model
from exotic_weights import k_quant_llama


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return k_quant_llama(tmp_path / "whole.gguf")


def split(path: Path, count: int, *, total: int | None = None) -> list[Path]:
    """The parts of a file, made by the gguf package with the keys of llama.cpp's splitter."""
    source = open_gguf(path)
    names = list(source.entries)
    paths = []
    for number in range(count):
        paths.append(path.with_name(f"part-{number + 1:05d}-of-{count:05d}.gguf"))
        writer = gguf.GGUFWriter(paths[-1], "llama")
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", total or len(names))
        if number == 0:
            for key, value in source.metadata.items():
                if key.startswith("llama."):
                    writer.add_float32(key, value) if isinstance(value, float) else writer.add_uint32(key, value)  # type: ignore[arg-type]
        for name in names[number::count]:
            tensor = source.tensor(name)
            kind = gguf.GGMLQuantizationType(tensor.format.ggml_type)
            data = tensor.data if tensor.format.is_quantized else tensor.dequantize()
            raw = {"raw_shape": data.shape, "raw_dtype": kind} if tensor.format.is_quantized else {}
            writer.add_tensor(name, np.array(data), **raw)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return paths


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
