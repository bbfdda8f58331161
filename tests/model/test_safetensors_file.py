"""safetensors files against the safetensors package, and damaged headers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from bifolio.errors import ConfigError, ModelFileError
from bifolio.model.huggingface.safetensors_file import open_safetensors, write_safetensors
from bifolio.quant import QuantFormat, QuantizedTensor


def raw_file(path: Path, header: Any, data: bytes = b"\0" * 24) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def test_reads_what_the_package_writes(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    arrays = {
        "a": generator.standard_normal((3, 5)).astype(np.float32),
        "b": generator.standard_normal((2, 3, 4)).astype(np.float16),
        "c": np.array(3, np.float32),
        "empty": np.zeros((0, 4), np.float32),
        "ids": np.arange(4) - 2,
        "places": np.arange(4, dtype=np.uint16),
    }
    safetensors.numpy.save_file(arrays, tmp_path / "x.safetensors", {"format": "np"})
    file = open_safetensors(tmp_path / "x.safetensors")
    assert set(file.tensors) == set(arrays)
    assert file.metadata == {"format": "np"}
    for name in ("a", "b", "c", "empty", "ids"):
        assert np.array_equal(file.tensors[name].dequantize(), arrays[name].astype(np.float32))
        assert not file.tensors[name].data.flags.writeable
    with pytest.raises(ModelFileError, match="'places' has type U16"):
        file.tensors["places"]


def test_the_package_reads_what_is_written(tmp_path: Path) -> None:
    values = np.random.default_rng(1).standard_normal((4, 6)).astype(np.float32)
    tensors = {
        "f32": values,
        "f16": QuantizedTensor.quantize(values, QuantFormat.F16),
        "bf16": QuantizedTensor.quantize(values, QuantFormat.BF16),
        "vector": values[0],
    }
    write_safetensors(tmp_path / "y.safetensors", tensors, {"k": "v"})
    import torch
    from safetensors.torch import load_file

    loaded = load_file(tmp_path / "y.safetensors")
    assert np.array_equal(loaded["f32"].numpy(), values)
    assert np.array_equal(loaded["f16"].numpy(), values.astype(np.float16))
    assert torch.equal(loaded["bf16"], torch.from_numpy(values).to(torch.bfloat16))
    assert list(tmp_path.iterdir()) == [tmp_path / "y.safetensors"]


def test_writing_refuses_quantised_tensors_and_leaves_nothing(tmp_path: Path) -> None:
    quantised = QuantizedTensor.quantize(np.ones((1, 32), np.float32), QuantFormat.Q4_0)
    with pytest.raises(ConfigError, match="Q4_0"):
        write_safetensors(tmp_path / "z.safetensors", {"q": quantised})
    assert list(tmp_path.iterdir()) == []


def test_an_existing_file_is_kept_unless_told_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "kept.safetensors"
    write_safetensors(path, {"a": np.ones(1, np.float32)})
    with pytest.raises(ConfigError, match="--force"):
        write_safetensors(path, {"a": np.zeros(1, np.float32)}, overwrite=False)
    assert open_safetensors(path).tensors["a"].dequantize()[0] == 1


GOOD = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
DAMAGED = {
    "wrong size": ({"a": GOOD | {"shape": [2, 4]}}, "does not fit"),
    "outside": ({"a": GOOD | {"data_offsets": [0, 28], "shape": [7]}}, "outside"),
    "reversed": ({"a": GOOD | {"data_offsets": [24, 0]}}, "outside"),
    "negative": ({"a": GOOD | {"shape": [-2, -3]}}, "malformed"),
    "boolean": ({"a": GOOD | {"shape": [True, 6]}}, "malformed"),
    "fraction": ({"a": GOOD | {"shape": [2.0, 3]}}, "malformed"),
    "overflowing product": ({"a": GOOD | {"shape": [2**62, 4]}}, "does not fit"),
    "too many dimensions": ({"a": GOOD | {"shape": [1] * 9}}, "dimensions"),
    "missing field": ({"a": {"dtype": "F32"}}, "lacks"),
    "overlap": (
        {
            "a": GOOD | {"data_offsets": [0, 16], "shape": [4]},
            "b": GOOD | {"data_offsets": [12, 24], "shape": [3]},
        },
        "overlaps",
    ),
    "gap": ({"a": GOOD | {"data_offsets": [4, 24], "shape": [5]}}, "gap"),
    "rest": ({"a": GOOD | {"data_offsets": [0, 20], "shape": [5]}}, "belong to no tensor"),
    "not JSON": (b"{", "not valid JSON"),
    "not UTF-8": (b"\xff\xfe{}", "not valid JSON"),
    "not an object": (b"[]", "not a JSON object"),
    "twice": (b'{"a": 1, "a": 2}', "occurs twice"),
    "deep": (b'{"a": ' + b"[" * 100 + b"]" * 100 + b"}", "lacks dtype"),
    "brackets": (b"[" * 100_000, "not a list of tensors"),
    "metadata": ({"__metadata__": {"a": 1}, "a": GOOD}, "__metadata__"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_headers_are_refused(tmp_path: Path, case: str) -> None:
    header, message = DAMAGED[case]
    with pytest.raises(ModelFileError, match=message):
        open_safetensors(raw_file(tmp_path / "bad.safetensors", header))


def test_short_and_missing_files_are_refused(tmp_path: Path) -> None:
    for content in (b"", b"\x01", b"\xff" * 8, (2**40).to_bytes(8, "little") + b"{}"):
        (tmp_path / "short.safetensors").write_bytes(content)
        with pytest.raises(ModelFileError):
            open_safetensors(tmp_path / "short.safetensors")
    with pytest.raises(ModelFileError, match="does not exist"):
        open_safetensors(tmp_path / "none.safetensors")
