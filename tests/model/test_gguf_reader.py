"""GGUF headers against the gguf package, and damaged ones."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from bifolio.errors import ModelFileError
from bifolio.model.gguf.reader import StringArray, open_gguf, string_starts, walk_strings


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def entry(key: bytes, kind: int, payload: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + payload


def tensor(name: bytes, dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return (
        text(name)
        + struct.pack("<I", len(dims))
        + struct.pack(f"<{len(dims)}Q", *dims)
        + struct.pack("<IQ", kind, offset)
    )


def raw_file(
    entries: list[bytes], tensors: list[bytes], data: int = 64, version: int = 3, counts: tuple[int, int] | None = None
) -> bytes:
    num_tensors, num_entries = counts or (len(tensors), len(entries))
    head = b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_entries) + b"".join(entries) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + bytes(data)


def test_values_of_every_type_equal_those_of_the_package(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    numbers = {"uint8": 200, "int8": -5, "uint16": 60000, "int16": -30000, "uint32": 4_000_000_000, "int32": -7,
               "uint64": 2**63, "int64": -(2**62), "float32": 1e-5, "float64": 0.1}  # fmt: skip
    for kind, value in numbers.items():
        getattr(writer, f"add_{kind}")(f"n.{kind}", value)
    writer.add_bool("n.bool", True)
    writer.add_string("n.string", "grüße")
    writer.add_array("a.strings", ["a", "", "ü🚀"])
    writer.add_array("a.ints", [1, -2, 3])
    writer.add_array("a.floats", [0.5, 1.5])
    writer.add_array("a.bools", [True, False])
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    writer.add_tensor("t.matrix", values)
    writer.add_tensor("t.half", values[0].astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    file = open_gguf(tmp_path / "x.gguf")
    for kind, value in numbers.items():
        assert file.metadata[f"n.{kind}"] == value
    assert file.metadata["n.bool"] is True
    assert file.metadata["n.string"] == "grüße"
    strings = file.metadata["a.strings"]
    assert isinstance(strings, StringArray)
    assert list(strings) == ["a", "", "ü🚀"]
    assert strings[2] == "ü🚀"
    for key, expected in (("a.ints", [1, -2, 3]), ("a.floats", [0.5, 1.5]), ("a.bools", [True, False])):
        assert np.asarray(file.metadata[key]).tolist() == expected
    assert np.array_equal(file.tensor("t.matrix").dequantize(), values)
    assert np.array_equal(file.tensor("t.half").dequantize(), values[0])
    assert not file.tensor("t.matrix").data.flags.writeable


@pytest.mark.slow
def test_a_real_file_equals_what_the_package_reads(models_dir: Path) -> None:
    path = models_dir / "SmolLM2-135M-Instruct.Q4_1.gguf"
    file, oracle = open_gguf(path), gguf.GGUFReader(path)
    assert list(file.entries) == [tensor.name for tensor in oracle.tensors]
    for expected in oracle.tensors:
        found = file.entries[expected.name]
        assert found.shape == tuple(int(size) for size in reversed(expected.shape))
        assert (found.format.name, found.offset, found.nbytes) == (
            expected.tensor_type.name,
            expected.data_offset,
            expected.n_bytes,
        )
    name = "blk.7.ffn_down.weight"
    data = next(tensor.data for tensor in oracle.tensors if tensor.name == name)
    assert np.array_equal(file.tensor(name).data.reshape(data.shape), data)


NUMBER = entry(b"general.x", 4, struct.pack("<I", 1))
GOOD = tensor(b"t", [16])
HUGE = 2**63
DAMAGED: dict[str, tuple[Callable[[], bytes], str]] = {
    "no magic": (lambda: b"GGML" + raw_file([], [GOOD])[4:], "does not begin with"),
    "short": (lambda: b"GGUF\x03\0\0\0", "too few"),
    "version 1": (lambda: raw_file([], [GOOD], version=1), "version 1"),
    "big-endian": (lambda: raw_file([], [GOOD], version=3 << 24), "big-endian"),
    "entries beyond the file": (lambda: raw_file([NUMBER], [GOOD], counts=(1, HUGE)), "metadata entries do not fit"),
    "tensors beyond the file": (lambda: raw_file([NUMBER], [GOOD], counts=(HUGE, 1)), "tensors do not fit"),
    "long key": (lambda: raw_file([struct.pack("<Q", HUGE) + b"k"], []), "more than the 65535"),
    "key beyond the file": (lambda: raw_file([struct.pack("<Q", 9999) + b"k"], []), "end after the end"),
    "key twice": (lambda: raw_file([NUMBER, NUMBER], []), "occurs twice"),
    "key not UTF-8": (lambda: raw_file([entry(b"\xff\xfe", 4, bytes(4))], []), "not UTF-8"),
    "unknown type": (lambda: raw_file([entry(b"k", 13, bytes(8))], []), "unknown type 13"),
    "string beyond the file": (lambda: raw_file([entry(b"k", 8, struct.pack("<Q", HUGE))], []), "end after the end"),
    "array of unknown type": (
        lambda: raw_file([entry(b"k", 9, struct.pack("<IQ", 99, 1) + bytes(8))], []), "unknown type 99"),
    "array beyond the file": (
        lambda: raw_file([entry(b"k", 9, struct.pack("<IQ", 10, HUGE))], []), "values of 'k' do not fit"),
    "strings beyond the file": (
        lambda: raw_file([entry(b"k", 9, struct.pack("<IQ", 8, HUGE))], []), "strings of 'k' do not fit"),
    "a string of an array beyond the file": (
        lambda: raw_file([entry(b"k", 9, struct.pack("<IQQ", 8, 1, HUGE))], []), "end after the end"),
    "deep nesting": (
        lambda: raw_file([entry(b"k", 9, struct.pack("<IQ", 9, 1) * 40 + struct.pack("<IQ", 0, 0))], []), "nested"),
    "no dimensions": (lambda: raw_file([], [tensor(b"t", [])], 64), "0 dimensions"),
    "five dimensions": (lambda: raw_file([], [tensor(b"t", [1] * 5)]), "5 dimensions"),
    "empty dimension": (lambda: raw_file([], [tensor(b"t", [0, 4])]), "cannot be stored"),
    "overflowing product": (lambda: raw_file([], [tensor(b"t", [2**32, 2**32, 2**32, 4])]), "ends after the end"),
    "partial block": (lambda: raw_file([], [tensor(b"t", [33], kind=8)]), "blocks of 32"),
    "unknown tensor type": (lambda: raw_file([], [tensor(b"t", [32], kind=4711)]), "4711 is unknown"),
    "tensor beyond the file": (lambda: raw_file([], [tensor(b"t", [17])]), "ends after the end"),
    "offset beyond the file": (lambda: raw_file([], [tensor(b"t", [1], offset=2**63 + 2**62)]), "ends after the end"),
    "offset not aligned": (lambda: raw_file([], [tensor(b"t", [1], offset=4)]), "not aligned"),
    "tensor twice": (lambda: raw_file([], [GOOD, GOOD]), "occurs twice"),
    "overlap": (lambda: raw_file([], [tensor(b"t", [9]), tensor(b"u", [1], offset=32)]), "overlap"),
    "alignment of zero": (
        lambda: raw_file([entry(b"general.alignment", 4, bytes(4))], [GOOD]), "power of two"),
    "odd alignment": (
        lambda: raw_file([entry(b"general.alignment", 4, struct.pack("<I", 48))], [GOOD]), "power of two"),
    "alignment of text": (
        lambda: raw_file([entry(b"general.alignment", 8, text(b"x"))], [GOOD]), "power of two"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_headers_are_refused_by_name(case: str, tmp_path: Path) -> None:
    make, message = DAMAGED[case]
    (tmp_path / "bad.gguf").write_bytes(make())
    with pytest.raises(ModelFileError, match=message):
        open_gguf(tmp_path / "bad.gguf")


def test_the_undamaged_file_opens(tmp_path: Path) -> None:
    (tmp_path / "good.gguf").write_bytes(raw_file([NUMBER], [GOOD]))
    assert open_gguf(tmp_path / "good.gguf").entries["t"].shape == (16,)
    (tmp_path / "two.gguf").write_bytes(raw_file([NUMBER], [GOOD], version=2))
    assert open_gguf(tmp_path / "two.gguf").version == 2


@pytest.mark.full
def test_every_truncation_of_a_file_is_refused(tmp_path: Path) -> None:
    whole = raw_file([NUMBER, entry(b"s", 9, struct.pack("<IQ", 8, 2) + text(b"a") + text(b"bc"))], [GOOD])
    for length in range(len(whole)):
        (tmp_path / "cut.gguf").write_bytes(whole[:length])
        with pytest.raises(ModelFileError):
            open_gguf(tmp_path / "cut.gguf")


def test_opening_costs_no_more_than_the_header(tmp_path: Path) -> None:
    """A gigabyte of tensors behind a small header: a sparse file, so that the test is quick."""
    rows = 1 << 13
    tensors = [tensor(b"t%d" % i, [4096, rows], 0, i * rows * 4096 * 4) for i in range(8)]
    head = raw_file([NUMBER], tensors, data=0)
    with (tmp_path / "big.gguf").open("wb") as file:
        file.write(head)
        file.truncate(len(head) + 8 * rows * 4096 * 4)
    assert (tmp_path / "big.gguf").stat().st_size > 1 << 30
    tracemalloc.start()
    opened = open_gguf(tmp_path / "big.gguf")
    views = [opened.tensor(name) for name in opened.entries]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(views) == 8
    assert peak < 1 << 20


def test_native_and_python_code_find_the_same_strings() -> None:
    data = np.frombuffer(b"...." + text(b"a") + text(b"") + text(b"longer text"), np.uint8)
    for count, size in ((3, len(data)), (2, len(data)), (3, len(data) - 1), (4, len(data)), (0, 4)):
        starts, end = string_starts(data[:size], 4, count)
        walked = np.zeros(count, np.uint64)
        assert walk_strings(data[:size], 4, walked) == end
        assert end == -1 or np.array_equal(walked, starts)
