"""`bifolio gguf` and `bifolio inspect --diff` from the outside."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bifolio.cli.main import build_app
from bifolio.errors import BifolioError
from bifolio.model.gguf.reader import open_gguf
from cli_runner import CliRunner, Result
from exotic_weights import k_quant_llama


def run(*arguments: object) -> Result:
    words = [str(argument) for argument in arguments]
    return CliRunner().invoke(build_app(words[:1]), words)


def printed(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.output + repr(result.exception)
    return result.stdout


def refusal(*arguments: object) -> str:
    result = run(*arguments)
    if isinstance(result.exception, BifolioError):
        return str(result.exception)
    assert result.exit_code == 2, result.output
    return result.stderr


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return k_quant_llama(tmp_path / "model.gguf")


@pytest.mark.full
def test_split_and_merge(model: Path, tmp_path: Path) -> None:
    plan = json.loads(printed("gguf", "split", model, "--max-tensors", "8", "--dry-run", "--json"))
    assert plan["written"] is False
    assert list(tmp_path.iterdir()) == [model]
    lines = printed("gguf", "split", model, "--max-tensors", 8).splitlines()
    assert lines[0].startswith(f"wrote {tmp_path}/model-00001-of-00003.gguf: 8 tensors, ")
    parts = sorted(tmp_path.glob("model-*"))
    assert [str(path) for path in parts] == [file["path"] for file in plan["files"]]
    assert [path.stat().st_size for path in parts] == [file["bytes"] for file in plan["files"]]
    assert "--force" in refusal("gguf", "split", model, "--max-tensors", 8)
    printed("gguf", "split", model, "--max-tensors", 8, "--force")
    target = tmp_path / "merged.gguf"
    assert printed("gguf", "merge", parts[0], target).startswith(f"wrote {target}: ")
    assert target.read_bytes() == model.read_bytes()
    assert "--force" in refusal("gguf", "merge", parts[0], target)
    assert "cannot be its output" in refusal("gguf", "merge", parts[0], parts[1], "--force")
    assert "is a folder" in refusal("gguf", "merge", parts[0], tmp_path, "--force")
    assert "is a whole model" in refusal("gguf", "merge", model, target)
    assert "--max-tensors: 0 is below 1" in refusal("gguf", "split", model, "--max-tensors", 0)
    assert "write for example 2GB" in refusal("gguf", "split", model, "--max-size", "a lot")
    assert printed("inspect", "--diff", parts[0], model).endswith("0 keys and 0 tensors differ, 20 tensors are equal\n")


@pytest.mark.full
def test_edit(model: Path, tmp_path: Path) -> None:
    target, template = tmp_path / "new.gguf", tmp_path / "template.jinja"
    template.write_text("{{ a = b }}\n")
    options = ("--set", "general.name=a=b [c]", "--type", "str", "--set-file", f"tokenizer.chat_template={template}")
    shown = printed("gguf", "edit", model, target, *options, "--set", "llama.context_length=32")
    assert shown.splitlines()[0] == "general.name (str): a=b [c]"
    assert "llama.context_length (u32): 32 (was 64)" in shown
    metadata = open_gguf(target).metadata
    assert metadata["general.name"] == "a=b [c]"
    assert metadata["tokenizer.chat_template"] == "{{ a = b }}\n"
    assert "one of them" in refusal("gguf", "edit", model, "--set", "a=b")
    assert "one of them" in refusal("gguf", "edit", model, target, "--in-place", "--set", "a=b")
    assert "--force" in refusal("gguf", "edit", model, target, *options)
    assert "write KEY=VALUE" in refusal("gguf", "edit", model, "--in-place", "--set", "general.name")
    assert "a occurs twice" in refusal("gguf", "edit", model, "--in-place", "--set", "a=1", "--set", "a=2")
    assert "write KEY=TYPE" in refusal(
        "gguf", "edit", model, "--in-place", "--set", "a=1", "--type", "u8", "--type", "u16"
    )
    before = model.read_bytes()
    changes = json.loads(
        printed("gguf", "edit", target, "--in-place", "--remove", "general.name", "--dry-run", "--json")
    )
    assert changes["changes"] == [
        {"key": "general.name", "new_key": None, "type": "str", "old": "a=b [c]", "new": None}
    ]
    assert "general.name: removed" in printed("gguf", "edit", target, "--in-place", "--remove", "general.name")
    assert "a.b: now c.d" in printed(
        "gguf", "edit", target, tmp_path / "x.gguf", "--set", "a.b=1", "--type", "u8"
    ) + printed("gguf", "edit", tmp_path / "x.gguf", "--in-place", "--rename", "a.b=c.d")
    assert "general.name" not in open_gguf(target).metadata
    assert model.read_bytes() == before


def test_diff(model: Path, tmp_path: Path) -> None:
    target = tmp_path / "new.gguf"
    printed("gguf", "edit", model, target, "--set", "general.name=[bold]x", "--type", "str")
    data = bytearray(target.read_bytes())
    entry = open_gguf(target).entries["output_norm.weight"]
    data[entry.offset + 3] ^= 1  # the exponent of the first value: 0.02 becomes 0.08
    target.write_bytes(data)
    result = run("inspect", "--diff", model, target)
    assert result.exit_code == 1
    assert "+ general.name (str): [bold]x\n" in result.stdout
    line = next(line for line in result.stdout.splitlines() if line.startswith("output_norm.weight"))
    assert line.split()[1:7] == ["256", "F32", "1", "of", "1,024", "1"]
    record = json.loads(run("inspect", model, "--diff", target, "--json").stdout)
    assert record["equal_tensors"] == 19
    assert record["tensors"][0]["values"]["num_values"] == 1
    tolerated = run("inspect", "--diff", model, target, "--tolerance", "0.1").stdout
    assert "1 keys and 0 tensors differ, 19 tensors are equal, 1 within the tolerance" in tolerated
    assert "--diff compares two models" in refusal("inspect", "--diff", model)
    assert "--diff compares two models" in refusal("inspect", model, target)
    (tmp_path / "x.bin").write_bytes(b"x")
    assert "is no GGUF file" in refusal("inspect", "--diff", model, tmp_path / "x.bin")


def test_inspect_shows_values_with_brackets_as_they_are(model: Path, tmp_path: Path) -> None:
    target = tmp_path / "new.gguf"
    printed("gguf", "edit", model, target, "--set", "general.name=[bold]x[/bold]", "--type", "str")
    assert " [bold]x[/bold]" in printed("inspect", target, "--no-tensors")
