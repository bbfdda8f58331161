"""`bifolio generate` on a folder: text that streams, files of prompts, and errors of one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bifolio import LLM, SamplingParams
from bifolio.cli.main import build_app
from bifolio.errors import BifolioError
from cli_runner import CliRunner
from helpers import CORPUS, tiny_folder

TEXT = "Once upon a time"


@pytest.fixture(scope="module")
def folder() -> Path:
    return tiny_folder(tokenizer=True)


def invoke(*arguments: str, input: str | None = None) -> str:
    result = CliRunner().invoke(build_app(), ["generate", *arguments], input=input, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def expected(folder: Path, text: str = TEXT, **options: object) -> str:
    params = SamplingParams(**{"max_tokens": 12, "temperature": 0.0, **options})  # type: ignore[arg-type]
    return LLM(folder, max_model_len=128).generate(text, params)[0].outputs[0].text


def test_the_text_and_its_continuation(folder: Path) -> None:
    printed = invoke("--model", str(folder), TEXT, "--max-tokens", "12", "--temperature", "0")
    assert printed == TEXT + expected(folder) + "\n"


def test_standard_input_and_sampling_options(folder: Path) -> None:
    options = [
        "--seed",
        "7",
        "--top-p",
        "0.9",
        "--top-k",
        "20",
        "--min-p",
        "0.01",
        "--repetition-penalty",
        "1.1",
        "-t",
        "0.8",
    ]
    printed = invoke("-m", str(folder), "-", "-n", "12", *options, "--max-model-len", "128", input=CORPUS[0])
    text = expected(folder, CORPUS[0], seed=7, top_p=0.9, top_k=20, min_p=0.01, repetition_penalty=1.1, temperature=0.8)
    assert printed == CORPUS[0] + text + "\n"


def test_files_of_prompts(folder: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [
        {"prompt": CORPUS[0]},
        {"prompt_token_ids": [5, 6, 7], "max_tokens": 3, "id": "x"},
        {"prompt": TEXT, "n": 2},
    ]
    source.write_text("\n\n".join(json.dumps(line) for line in lines) + "\n")
    arguments = ["-m", str(folder), "--input", str(source), "-n", "12", "-t", "0", "--ignore-eos", "--block-size", "4"]
    assert invoke(*arguments, "--output", str(target)) == ""
    records = [json.loads(line) for line in target.read_text().splitlines()]
    assert [record["prompt"] for record in records] == [CORPUS[0], None, TEXT]
    assert [record.get("id") for record in records] == [None, "x", None]
    assert [len(record["outputs"]) for record in records] == [1, 1, 2]
    assert [len(record["outputs"][0]["token_ids"]) for record in records] == [12, 3, 12]
    assert records[2]["outputs"][0]["text"] == expected(folder, ignore_eos=True)
    assert invoke(*arguments) == target.read_text()


BAD_LINES = [
    "not json",
    "[1]",
    '{"nothing": 1}',
    '{"prompt": 5}',
    '{"prompt": "a", "tempature": 1}',
    '{"prompt": "a", "n": 0}',
]


@pytest.mark.parametrize("content", BAD_LINES)
def test_files_that_are_not_prompts(folder: Path, tmp_path: Path, content: str) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "a"}\n\n' + content + "\n")
    result = CliRunner().invoke(build_app(), ["generate", "-m", str(folder), "--input", str(source)])
    assert result.exit_code == 2
    assert "in.jsonl:3" in "".join(result.output.split())


def test_a_file_of_prompts_that_is_not_there(folder: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(build_app(), ["generate", "-m", str(folder), "--input", str(tmp_path / "none")])
    assert result.exit_code == 2
    assert "does not exist" in result.output


@pytest.mark.parametrize(
    "arguments",
    [
        ["-m", "/nowhere/model", TEXT],
        ["-m", "FOLDER", TEXT, "--temperature", "-1"],
        ["-m", "FOLDER", TEXT, "--max-model-len", "100000"],
        ["-m", "FOLDER", ""],
    ],
)
def test_mistakes_are_named_errors(folder: Path, arguments: list[str]) -> None:
    arguments = [str(folder) if word == "FOLDER" else word for word in arguments]
    with pytest.raises(BifolioError):
        CliRunner().invoke(build_app(), ["generate", *arguments], catch_exceptions=False)


def test_mistakes_are_one_line_on_a_terminal() -> None:
    command = [sys.executable, "-m", "bifolio.cli.main", "generate", "-m", "/nowhere/model", TEXT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.strip().splitlines()) == 1
