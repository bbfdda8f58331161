"""`bifolio generate` on a folder: text that streams, files of prompts, and errors of one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bifolio import LLM, BeamSearchParams, SamplingParams
from bifolio.cli.main import build_app
from bifolio.errors import BifolioError, ConfigError, GrammarError
from cli_runner import CliRunner
from helpers import CORPUS, tiny_folder
from infill_models import infill_folder

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
    options = ("--model", str(folder), TEXT, "--max-tokens", "12", "--temperature", "0")
    assert invoke(*options, "--echo") == TEXT + expected(folder) + "\n"
    assert invoke(*options, "--no-echo") == invoke(*options) == expected(folder) + "\n"  # no terminal: no echo


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
    assert printed == text + "\n"


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


def test_nothing_is_echoed_before_the_request_was_checked(folder: Path) -> None:
    for bad in (["-t", "-1"], ["--top-p", "2"], ["--max-model-len", "4"]):
        result = CliRunner().invoke(build_app(), ["generate", "-m", str(folder), TEXT * 3, "--echo", *bad])
        assert isinstance(result.exception, BifolioError)
        assert result.stdout == ""


@pytest.mark.full
def test_piped_text_is_the_prompt(folder: Path) -> None:
    command = [sys.executable, "-m", "bifolio", "generate", "-m", str(folder), "-n", "12", "-t", "0"]
    done = subprocess.run(command, input=TEXT + "\n", capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == expected(folder) + "\n"
    silent = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=True)
    assert silent.stdout == TEXT + expected(folder) + "\n"  # a story, with its beginning


def test_schemas_inline_and_from_a_file_give_pure_json(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    schema = (
        '{"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": false}'
    )
    (tmp_path / "schema.json").write_text(schema)
    for given in (schema, str(tmp_path / "schema.json")):
        printed = invoke("-m", str(folder), TEXT, "--json-schema", given, "-n", "60", "--seed", "1")
        assert json.loads(printed)["a"] in (1, 2)
    for bad in ("{not json", str(tmp_path / "none.json")):
        with pytest.raises(GrammarError):
            invoke("-m", str(folder), TEXT, "--json-schema", bad)


def test_beams_print_the_best_text(folder: Path, tmp_path: Path) -> None:
    best = LLM(folder, max_model_len=128).beam_search(TEXT, BeamSearchParams(beam_width=4, max_tokens=12))[0].outputs[0]
    assert invoke("-m", str(folder), TEXT, "--beams", "4", "-n", "12", "--max-model-len", "128") == best.text + "\n"
    record = json.loads(invoke("-m", str(folder), TEXT, "--beams", "4", "-n", "12", "--json"))
    assert record["outputs"][0]["text"] == best.text
    assert record["outputs"][0]["score"] == pytest.approx(best.score)
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps({"prompt": TEXT, "length_penalty": 1.0}) + "\n")
    assert json.loads(invoke("-m", str(folder), "-i", str(source), "--beams", "4", "-n", "12")) == record
    result = CliRunner().invoke(build_app(), ["generate", "-m", str(folder), TEXT, "--beams", "4", "-t", "1"])
    assert result.exit_code == 2
    assert "temperature has no meaning with --beams" in result.stderr


def test_json_has_the_text_and_its_tokens(folder: Path) -> None:
    record = json.loads(invoke("-m", str(folder), TEXT, "-n", "12", "-t", "0", "--json"))
    (output,) = record["outputs"]
    assert (record["prompt"], output["text"]) == (TEXT, expected(folder))
    assert len(output["token_ids"]) <= 12


@pytest.mark.full
def test_lines_of_messages_and_the_default_length(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "m", tokenizer=True, chat_template="{{ messages[-1].content }}")
    source = tmp_path / "in.jsonl"
    lines = [{"messages": [{"role": "user", "content": TEXT}]}, {"prompt": TEXT}]
    source.write_text("".join(json.dumps({**line, "ignore_eos": True}) + "\n" for line in lines))
    records = [json.loads(line) for line in invoke("-m", str(folder), "-i", str(source), "-t", "0").splitlines()]
    single = json.loads(invoke("-m", str(folder), TEXT, "-t", "0", "--ignore-eos", "--json"))
    assert [record["outputs"] for record in records] == [single["outputs"]] * 2
    length = LLM(folder).engine.config.max_model_len
    assert len(single["outputs"][0]["token_ids"]) == min(256, length - len(single["prompt_token_ids"]))


def test_an_unknown_field_is_named(folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "a", "tempature": 1}\n')
    result = CliRunner().invoke(build_app(), ["generate", "-m", str(folder), "--input", str(source)])
    assert result.exit_code == 2
    assert "'tempature' is not a field of a line: did you mean 'temperature'?" in result.stderr


def test_too_little_memory_is_advised_without_nonsense() -> None:
    with pytest.raises(ConfigError) as caught:
        invoke(TEXT, "--memory", "300kB")
    assert "max_model_len <=" not in str(caught.value)
    assert "pass at least 6.49 MB of memory" in str(caught.value)
    with pytest.raises(ConfigError, match="max_model_len <= 64, or at least"):
        invoke(TEXT, "--memory", "1MB")


@pytest.mark.full
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "command", [["generate", "--device", "cuda", TEXT], ["bench", "throughput", "--device", "cuda"]]
)
def test_a_missing_gpu_is_one_sentence(command: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bifolio", *command], capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: device 'cuda' needs")
    assert len(done.stderr.strip().splitlines()) == 1


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


@pytest.mark.full
def test_mistakes_are_one_line_on_a_terminal() -> None:
    command = [sys.executable, "-m", "bifolio.cli.main", "generate", "-m", "/nowhere/model", TEXT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_gap_is_filled_before_a_suffix(folder: Path, tmp_path: Path) -> None:
    coder = infill_folder()
    options = ("-m", str(coder), "-n", "12", "-t", "0", "--max-model-len", "128")
    params = SamplingParams(max_tokens=12, temperature=0.0)
    filled = LLM(coder, max_model_len=128).generate({"prompt": TEXT, "suffix": " end."}, params)[0].outputs[0].text
    assert invoke(*options, TEXT, "--suffix", " end.") == filled + "\n"
    assert invoke(*options, TEXT, "--suffix", " end.", "--echo") == TEXT + filled + " end.\n"
    lines = tmp_path / "lines.jsonl"
    lines.write_text(json.dumps({"prompt": TEXT, "suffix": " end."}) + "\n")
    assert json.loads(invoke(*options, "--input", str(lines)))["outputs"][0]["text"] == filled
    result = CliRunner().invoke(build_app(), ["generate", *options, "--input", str(lines), "--suffix", "x"])
    assert result.exit_code == 2
    assert "put a 'suffix' into the lines of --input" in result.output
    with pytest.raises(BifolioError, match="leave the suffix out, or use a model such as"):
        invoke("-m", str(folder), TEXT, "--suffix", "x")
