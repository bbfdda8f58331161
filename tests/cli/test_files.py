"""Files that commands read and write: mistakes are one line with the option's name, before any work."""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from bifolio.cli.generate import given_text
from bifolio.cli.main import build_app
from bifolio.errors import BifolioError, ConfigError, RequestError
from bifolio.model import loader
from bifolio.model.file_access import atomic_path
from bifolio.model.loader import open_text_model
from cli_runner import CliRunner, Result
from helpers import tiny_folder

LATIN1 = "café au lait".encode("latin1")  # byte 3 is the first that is not UTF-8


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that opens a model has begun its work."""

    def opened(*_: Any) -> None:
        raise AssertionError("a model was opened")

    monkeypatch.setattr(loader, "load_model", opened)


def run(*arguments: object) -> Result:
    words = [str(argument) for argument in arguments]
    return CliRunner().invoke(build_app(words[:1]), words)


def refusal(*arguments: object) -> str:
    """The one sentence with which a command ends."""
    result = run(*arguments)
    assert result.exit_code != 0
    if result.exception is None:
        assert result.exit_code == 2
        return result.stderr.splitlines()[-1]
    assert isinstance(result.exception, BifolioError), repr(result.exception)
    return str(result.exception)


def test_the_text_of_generate_goes_to_its_file(tmp_path: Path) -> None:
    folder, target = tiny_folder(tokenizer=True), tmp_path / "out.txt"
    options = ("generate", "-m", folder, "Once upon a time", "-n", "6", "-t", "0", "--max-model-len", "64")
    printed = run(*options).stdout
    written = run(*options, "--output", target)
    assert (written.exit_code, written.stdout) == (0, "")
    assert target.read_text() == printed != ""
    run(*options, "--json", "-o", target)
    assert target.read_text() == run(*options, "--json").stdout
    assert "No space left on device" in refusal(*options, "-o", "/dev/full")


@pytest.mark.usefixtures("no_model")
def test_outputs_that_cannot_be_written_are_refused_by_name(tmp_path: Path) -> None:
    assert f"--output/-o: the folder {tmp_path}/none does not exist" in refusal(
        "generate", "Once", "--output", tmp_path / "none" / "out.txt"
    )
    assert f"--output/-o: {tmp_path} is a folder" in refusal("generate", "Once", "-o", tmp_path)


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("/dev/full", "/dev/full is a device"),
        ("/dev/full/x.gguf", "cannot be written: Not a directory (/dev/full)"),
        ("/proc/none/x.gguf", "/proc/none/x.gguf cannot be written"),
        ("/dev/null/a/b", "cannot be written: Not a directory"),
    ],
)
def test_impossible_targets_are_refused_before_work(target: str, said: str, tmp_path: Path) -> None:
    assert said in refusal("quantize", "stories-draft", target, "-f", "f16", "--force")
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time")
    assert said in refusal("imatrix", "stories-draft", text, target, "--force")


class Disk(NamedTuple):
    total: int
    used: int
    free: int


def test_a_disk_with_too_little_space_is_refused_before_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny_folder(tokenizer=True)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Disk(1000, 999, 1))
    for target in ("a.gguf", "folder"):
        assert "its disk has 0.0 MB left" in refusal("quantize", source, tmp_path / target, "-f", "f16")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_is_a_named_error(tmp_path: Path) -> None:
    said = r"a\.gguf cannot be written: No space left on device"
    with (
        pytest.raises(ConfigError, match=said),
        atomic_path(tmp_path / "a.gguf"),
        open("/dev/full", "wb", buffering=0) as file,
    ):
        file.write(b"x")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_model")
def test_texts_that_are_not_utf8_are_refused(tmp_path: Path) -> None:
    text = tmp_path / "latin1.txt"
    text.write_bytes(LATIN1)
    said = "latin1.txt is not UTF-8 (byte 3)"
    assert said in refusal("eval", text)
    assert said in refusal("imatrix", "stories-draft", text, tmp_path / "a.gguf")
    assert f"--eval {text} is not UTF-8 (byte 3)" in refusal(
        "quantize", "stories-draft", tmp_path / "a.gguf", "-f", "f16", "--eval", text
    )
    assert "--eval" in refusal("quantize", "stories-draft", tmp_path / "a.gguf", "-f", "f16", "--eval", tmp_path / "no")


def test_prompts_that_are_not_utf8_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = tmp_path / "lines.jsonl"
    lines.write_bytes(b'{"prompt": "' + LATIN1 + b'"}\n')
    assert "is not UTF-8 (byte 15)" in refusal("generate", "-m", tiny_folder(tokenizer=True), "--input", lines)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(LATIN1)))
    with pytest.raises(ConfigError, match=r"standard input is not UTF-8 \(byte 3\)"):
        given_text("-")


@pytest.mark.parametrize("model", ["stories", None])  # a tokenizer of a GGUF file, and one of a folder
def test_tokenizers_name_the_byte_that_is_not_utf8(model: str | None) -> None:
    tokenizer = open_text_model(model or tiny_folder(tokenizer=True)).require_tokenizer()
    with pytest.raises(RequestError, match=r"the text is not UTF-8 \(byte 3 is 0xE9\): convert it"):
        tokenizer.encode(LATIN1.decode("utf-8", "surrogateescape"))  # as Python reads arguments
    with pytest.raises(RequestError, match=r"half of a surrogate pair \(U\+D83D at character 2\)"):
        tokenizer.encode("hi\ud83d")


@pytest.mark.parametrize("verb", [("generate", "Once"), ("inspect", "stories", "--no-tensors")])
def test_more_memory_than_the_machine_has_is_refused(verb: tuple[str, ...]) -> None:
    result = run(*verb, "--memory", "9000GB")
    said = str(result.exception or result.stdout)
    assert "a cache of 9 TB does not fit into the" in said
    assert "of this machine: ask for less memory" in said


def test_inspect_compares_with_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    from bifolio.engine import memory

    monkeypatch.setattr(memory, "free_memory", lambda: 10_000_000)
    assert "take 65.4 MB, more than the free memory" in run("inspect", "stories", "--memory", "50MB").stdout
    monkeypatch.setattr(memory, "free_memory", lambda: 10_000_000_000)
    assert "more than the free memory" not in run("inspect", "stories", "--memory", "50MB").stdout
