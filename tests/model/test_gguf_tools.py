"""GGUF files that are split, merged and edited, against the gguf package."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bifolio.errors import ConfigError, ModelFileError
from bifolio.model import file_access
from bifolio.model.gguf import new_file, split_writer
from bifolio.model.gguf.difference import compare
from bifolio.model.gguf.edit import Edits, plan_edit
from bifolio.model.gguf.new_file import NewFile, write_files
from bifolio.model.gguf.reader import open_gguf
from bifolio.model.gguf.split import open_whole_gguf
from bifolio.model.gguf.split_writer import plan_merge, plan_split
from bifolio.model.gguf.typed_values import encode_text, parse_type
from bifolio.model.loader import load_model
from exotic_weights import k_quant_llama

SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=4)
KINDS = st.sampled_from(["F32", "F16", "I8", "I32", "Q8_0", "Q4_0"])
VALUES = st.one_of(
    st.text(max_size=8), st.booleans(), st.integers(0, 2**32 - 1), st.floats(width=32, allow_nan=False),
    st.lists(st.text(max_size=4), min_size=1, max_size=3), st.lists(st.integers(-9, 9), min_size=1, max_size=4),
)  # fmt: skip
FILES = st.fixed_dictionaries(
    {
        "tensors": st.lists(st.tuples(KINDS, SHAPES), max_size=9),
        "entries": st.dictionaries(st.from_regex(r"[a-z]{1,6}\.[a-z]{1,6}", fullmatch=True), VALUES, max_size=5),
        "alignment": st.sampled_from([None, 8, 64]),
    }
)


def write_random(path: Path, content: dict[str, Any]) -> Path:
    """A file by the gguf package."""
    writer = gguf.GGUFWriter(path, "llama")
    if content["alignment"] is not None:
        writer.add_custom_alignment(content["alignment"])
    for key, value in content["entries"].items():
        add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32,
               list: writer.add_array}[type(value)]  # fmt: skip
        add(key, value)
    rng = np.random.default_rng(len(content["tensors"]))
    for number, (kind, shape) in enumerate(content["tensors"]):
        type_ = gguf.GGMLQuantizationType[kind]
        elements, size = gguf.GGML_QUANT_SIZES[type_]
        byte_shape = (*shape[:-1], shape[-1] * size)  # in blocks: all sizes are allowed
        assert elements in (1, 32)
        writer.add_tensor(
            f"t.{number}", rng.integers(0, 256, byte_shape, np.uint8), raw_shape=byte_shape, raw_dtype=type_
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def split_into(path: Path, prefix: Path, **limits: Any) -> list[NewFile]:
    parts = plan_split(open_whole_gguf(path), prefix, **limits)
    write_files(parts, overwrite=False)
    return parts


@pytest.mark.full
@settings(max_examples=25, deadline=None)
@given(
    FILES, st.one_of(st.none(), st.integers(1, 5)), st.one_of(st.none(), st.integers(1000, 4000)), st.booleans()
)  # fmt: skip
def test_merged_parts_are_the_file_that_was_split(
    content: dict[str, Any], max_tensors: int | None, max_bytes: int | None, metadata_alone: bool
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole = write_random(folder / "whole.gguf", content)
        try:
            parts = split_into(
                whole, folder / "p", max_tensors=max_tensors, max_bytes=max_bytes, metadata_alone=metadata_alone
            )
        except ConfigError:  # the metadata or a tensor is larger than a file may be
            assert max_bytes is not None
            assert [path.name for path in folder.iterdir()] == ["whole.gguf"]
            return
        names = [tensor.entry.name for part in parts for tensor in part.tensors]
        assert names == [f"t.{number}" for number in range(len(content["tensors"]))]
        for number, part in enumerate(parts):
            assert part.path.name == f"p-{number + 1:05d}-of-{len(parts):05d}.gguf"
            assert part.path.stat().st_size == part.size <= (max_bytes or part.size)
            assert len(part.tensors) <= (max_tensors or 128)
            check_with_package(part, number, len(parts), len(names), whole)
        assert metadata_alone is False or not parts[0].tensors
        write_files([plan_merge(open_whole_gguf(parts[-1].path), folder / "merged.gguf")], overwrite=False)
        assert (folder / "merged.gguf").read_bytes() == whole.read_bytes()


def check_with_package(part: NewFile, number: int, count: int, total: int, whole: Path) -> None:
    """The gguf package reads the keys of the part, with llama.cpp's types, and its tensors bit by bit."""
    read, source = gguf.GGUFReader(part.path), gguf.GGUFReader(whole)
    keys = {name: read.fields[name] for name in ("split.no", "split.count", "split.tensors.count")}
    assert [field.contents() for field in keys.values()] == [number, count, total]
    kinds = gguf.GGUFValueType
    assert [field.types for field in keys.values()] == [[kinds.UINT16], [kinds.UINT16], [kinds.INT32]]
    assert (number == 0) == ("general.architecture" in read.fields)
    originals = {tensor.name: tensor for tensor in source.tensors}
    for tensor in read.tensors:
        original = originals[tensor.name]
        assert (tensor.tensor_type, tensor.shape.tolist()) == (original.tensor_type, original.shape.tolist())
        assert tensor.data.tobytes() == original.data.tobytes()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return k_quant_llama(tmp_path / "model.gguf")


@pytest.mark.full
def test_a_model_in_parts_opens_and_is_cut_anew(model: Path, tmp_path: Path) -> None:
    parts = split_into(model, tmp_path / "p", max_tensors=7)
    again = split_into(parts[0].path, tmp_path / "again.gguf", max_bytes=400_000)
    assert again[0].path.name.startswith("again-00001-of-")
    assert not compare(open_whole_gguf(model), open_whole_gguf(again[0].path)).tensors
    assert load_model(again[0].path).config == load_model(model).config
    with pytest.raises(ConfigError, match="is read by this command and cannot be its output"):
        write_files(plan_split(open_whole_gguf(parts[0].path), max_tensors=7), overwrite=True)
    assert open_whole_gguf(parts[0].path).entries.keys() == open_gguf(model).entries.keys()


def test_limits_that_cannot_hold_are_refused_before_any_work(model: Path, tmp_path: Path) -> None:
    file = open_whole_gguf(model)
    with pytest.raises(ConfigError, match=r"the tensor 'token_embd\.weight' takes \d+ bytes .* --max-size 5000"):
        plan_split(file, max_bytes=5000)
    with pytest.raises(ConfigError, match="the metadata take"):
        plan_split(file, max_bytes=100)
    many = write_random(tmp_path / "many.gguf", {"tensors": [], "entries": {}, "alignment": None})
    assert len(plan_split(open_whole_gguf(many))) == 1
    with pytest.raises(ConfigError, match="is a whole model: pass the first of several parts"):
        plan_merge(file, tmp_path / "m.gguf")


def test_too_many_parts_are_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_writer, "MAX_FILES", 19)
    with pytest.raises(ConfigError, match="the limits make 20 files, more than 19: raise them"):
        plan_split(open_whole_gguf(model), max_tensors=1)


def test_existing_outputs_small_disks_and_truncated_inputs_are_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = plan_split(open_whole_gguf(model), tmp_path / "out" / "p", max_tensors=7)
    usage = file_access.shutil.disk_usage(tmp_path)
    total = sum(part.size for part in parts)
    monkeypatch.setattr(file_access.shutil, "disk_usage", lambda _: usage._replace(free=total - 1))
    with pytest.raises(ConfigError, match="free space, or choose"):  # every part alone would fit
        write_files(parts, overwrite=False)
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    (tmp_path / "out").mkdir()
    parts[1].path.write_text("precious")
    with pytest.raises(ConfigError, match="exists already: choose another name or pass --force"):
        write_files(parts, overwrite=False)
    assert [path.name for path in (tmp_path / "out").iterdir()] == [parts[1].path.name]
    write_files(parts, overwrite=True)
    part = parts[2].path
    part.write_bytes(part.read_bytes()[:-400])
    with pytest.raises(ModelFileError, match=rf"{part.name}: tensor .* ends after the end of the file, .* truncated"):
        plan_merge(open_whole_gguf(parts[0].path), tmp_path / "m.gguf")


def test_a_source_that_shrinks_while_it_is_read_is_named(model: Path, tmp_path: Path) -> None:
    merged = NewFile(tmp_path / "copy.gguf", (), new_file.stored_tensors(open_gguf(model)))
    model.write_bytes(model.read_bytes()[:200_000])
    with pytest.raises(ModelFileError, match=r"ended inside the tensor .*: the file changed while it was read"):
        write_files([merged], overwrite=False)
    assert not (tmp_path / "copy.gguf").exists()


KILLED = """
import os, signal, sys
from pathlib import Path
from bifolio.model.gguf.new_file import write_files
from bifolio.model.gguf.split import open_whole_gguf
from bifolio.model.gguf.split_writer import plan_split

def stop(done, total):
    if done > total * 0.9:
        os.kill(os.getpid(), signal.SIGKILL)

parts = plan_split(open_whole_gguf(Path(sys.argv[1])), Path(sys.argv[2]), max_tensors=7)
write_files(parts, overwrite=False, progress=stop)
"""


@pytest.mark.full
def test_a_killed_split_leaves_no_part_under_its_name(model: Path, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(model), str(tmp_path / "p")], check=False)
    assert done.returncode == -signal.SIGKILL
    assert [path.name for path in tmp_path.glob("*.gguf")] == ["model.gguf"]
    assert list(tmp_path.glob(".p-*.partial"))  # it had begun


def test_a_failed_split_leaves_nothing(model: Path, tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        if done > total * 0.9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_files(
            plan_split(open_whole_gguf(model), tmp_path / "p", max_tensors=7), overwrite=False, progress=stop
        )  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_tensors_are_streamed(tmp_path: Path) -> None:
    large = {"tensors": [("I8", [3, 8 << 20])], "entries": {}, "alignment": None}
    path = write_random(tmp_path / "large.gguf", large)
    parts = plan_split(open_whole_gguf(path), tmp_path / "p")
    tracemalloc.start()
    write_files(parts, overwrite=False)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert parts[0].size > 24 << 20
    assert peak < 6 << 20


# -- edits ------------------------------------------------------------------------------------------------------------


def edited(model: Path, edits: Edits, **options: Any) -> gguf.GGUFReader:
    target = model.with_name("edited.gguf")
    write_files([plan_edit(model, target, edits, **options)[0]], overwrite=True)
    assert not compare(open_gguf(model), open_gguf(target)).tensors
    return gguf.GGUFReader(target)


def test_existing_keys_keep_their_types_and_places(model: Path) -> None:
    read = edited(model, Edits({"llama.context_length": "128", "llama.attention.layer_norm_rms_epsilon": "0.5"}))
    before = gguf.GGUFReader(model)
    assert list(read.fields) == list(before.fields)
    for key, value in (("llama.context_length", 128), ("llama.attention.layer_norm_rms_epsilon", 0.5)):
        assert (read.fields[key].contents(), read.fields[key].types) == (value, before.fields[key].types)


def test_new_keys_of_every_type_are_read_by_the_package(model: Path) -> None:
    written = {"u8": "200", "i8": "-5", "u16": "60000", "i16": "-30000", "u32": "4000000000", "i32": "-7",
               "u64": str(2**63), "i64": str(-(2**62)), "f32": "0.5", "f64": "0.1", "bool": "true", "str": "=grüße\n",
               "arr[str]": '["a", "ü", ""]', "arr[u16]": "[1, 2]", "arr[f32]": "[1, 0.5]",
               "arr[bool]": "[true, false]", "arr[i64]": "[]"}  # fmt: skip
    keys = {name: f"new.{number}" for number, name in enumerate(written)}
    read = edited(
        model, Edits({keys[n]: text for n, text in written.items()}, types={keys[n]: n for n in written})
    )  # fmt: skip
    expected = [200, -5, 60000, -30000, 4_000_000_000, -7, 2**63, -(2**62), 0.5, 0.1, True, "=grüße\n", ["a", "ü", ""],
                [1, 2], [1.0, 0.5], [True, False], []]  # fmt: skip
    assert [read.fields[key].contents() for key in keys.values()] == expected
    own = open_gguf(model.with_name("edited.gguf")).metadata
    assert own["new.11"] == "=grüße\n"
    names = {name: read.fields[key].types[0].name for name, key in keys.items()}
    assert (names["u8"], names["f64"], names["arr[bool]"]) == ("UINT8", "FLOAT64", "ARRAY")


def test_keys_are_removed_and_renamed(model: Path) -> None:
    source = edited(model, Edits({"my.note": "x", "my.other": "y"}, new_type="string"))
    again = model.with_name("edited.gguf")
    plan, changes = plan_edit(again, again, Edits(removed=["my.note"], renamed={"my.other": "my.name"}))
    write_files([plan], overwrite=True, in_place=True)
    read = gguf.GGUFReader(again)
    assert "my.note" not in read.fields
    assert read.fields["my.name"].contents() == "y"
    assert list(read.fields).index("my.name") == list(source.fields).index("my.note")
    assert [(change.key, change.new_key, change.type) for change in changes] == [
        ("my.note", None, "str"), ("my.other", "my.name", "str")
    ]  # fmt: skip


def test_another_alignment_moves_the_tensors(model: Path) -> None:
    edited(model, Edits({"general.alignment": "256"}, new_type="u32"))
    moved = open_gguf(model.with_name("edited.gguf"))
    assert all(entry.offset % 256 == 0 for entry in moved.entries.values())
    with pytest.raises(ModelFileError, match="power of two"):
        plan_edit(model, model, Edits({"general.alignment": "48"}, new_type="u32"))


@pytest.mark.parametrize(
    ("edits", "said"),
    [
        (Edits(), "nothing to change"),
        (Edits({"a.b": "1"}), "no key 'a.b' yet: pass --type with one of u8,"),
        (Edits({"a.b": "1"}, new_type="u33"), "there is no type 'u33': did you mean"),
        (Edits({"llama.block_count": "many"}), "has the type u32, and 'many' is no value of it"),
        (Edits({"llama.block_count": "-1"}), "has the type u32, whose range does not hold -1"),
        (Edits({"a.b": "1e39"}, new_type="f32"), "whose range does not hold 1e"),
        (Edits({"a.b": "yes"}, new_type="bool"), "has the type bool, and 'yes' is no value of it"),
        (Edits({"a.b": "1"}, new_type="arr[u8]"), "is no JSON array"),
        (Edits({"a.b": "[1, true]"}, new_type="arr[u8]"), "has the type u8, and True is no value of it"),
        (Edits({"a.b": "[256]"}, new_type="arr[u8]"), "range does not hold 256"),
        (Edits({"a.b": "\ud800"}, new_type="str"), "is not UTF-8"),
        (Edits(removed=["llama.block_counts"]), "no key 'llama.block_counts': did you mean 'llama.block_count'"),
        (Edits(renamed={"llama.vocab": "x"}), "no key 'llama.vocab'"),
        (Edits(renamed={"llama.context_length": "llama.block_count"}), "has a key 'llama.block_count' already"),
        (Edits({"llama.block_count": "2"}, ["llama.block_count"]), "stands in two options"),
        (Edits({"llama.block_count": "2"}, types={"llama.x": "u8"}), "--type names llama.x, which no --set changes"),
        (Edits(removed=["general.architecture"]), "programs that read the file need general.architecture"),
        (Edits(renamed={"llama.block_count": "llama.layers"}), "programs that read the file need llama.block_count"),
        (Edits({"llama.block_count": "9"}), "would not open: .* 'blk.2.* is missing"),
        (Edits({"llama.block_count": "1"}), "would leave 9 of its tensors unused, such as blk.1"),
        (Edits({"llama.attention.head_count": "3"}), "would not open"),
        (Edits({"general.architecture": "qwen2"}), "would not open"),
        (Edits({"llama.block_count": "2"}, types={"llama.block_count": "str"}), "would not open"),
    ],
)
def test_edits_that_cannot_be_made_or_break_the_model_are_refused(model: Path, edits: Edits, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        plan_edit(model, model.with_name("new.gguf"), edits)


def test_a_broken_model_is_written_where_it_is_allowed(model: Path) -> None:
    read = edited(model, Edits({"llama.block_count": "9"}), allow_broken=True)
    assert read.fields["llama.block_count"].contents() == 9


def test_a_file_of_an_unknown_kind_keeps_its_architecture(tmp_path: Path) -> None:
    path = write_random(tmp_path / "x.gguf", {"tensors": [], "entries": {"a.b": "c"}, "alignment": None})
    with pytest.raises(ConfigError, match=r"general\.architecture names the other keys: pass --allow-broken"):
        plan_edit(path, path, Edits({"general.architecture": "clip"}))
    plan_edit(path, path, Edits({"a.b": "d"}))


def test_keys_of_parts_are_kept(model: Path, tmp_path: Path) -> None:
    first = split_into(model, tmp_path / "p", max_tensors=10)[0].path
    with pytest.raises(ConfigError, match=r"need split\.no"):
        plan_edit(first, first, Edits({"split.no": "1"}))
    write_files([plan_edit(first, first, Edits({"a.b": "c"}, new_type="str"))[0]], overwrite=True, in_place=True)
    assert open_whole_gguf(first).metadata["a.b"] == "c"
    assert load_model(first).config == load_model(model).config


def test_arrays_of_arrays_cannot_be_set() -> None:
    with pytest.raises(ConfigError, match="array of arrays"):
        encode_text("[[1]]", parse_type("arr[u8]")._replace(item=9), "a.b")
