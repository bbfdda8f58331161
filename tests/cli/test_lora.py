"""`--lora` of `generate` and `chat`: one adapter, a sum of several, and paths that are none."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from adapter_files import adapter_folder
from bifolio import LLM, SamplingParams
from bifolio.cli.main import build_app
from bifolio.errors import BifolioError
from cli_runner import CliRunner
from helpers import tiny_folder

TEXT = "Once upon a time"
OPTIONS = ("-n", "12", "-t", "0", "--max-model-len", "128")


@cache
def base() -> Path:
    return tiny_folder(tokenizer=True, chat_template="{% for m in messages %}{{ m.content }} {% endfor %}")


@cache
def adapter(seed: int) -> Path:
    return adapter_folder(base(), seed=seed)


def invoke(verb: str, *arguments: str, input: str | None = None) -> str:
    result = CliRunner().invoke(build_app(), [verb, "-m", str(base()), *arguments], input=input)
    assert result.exit_code == 0, result.output
    return result.stdout


def expected(sources: list[tuple[Path, float]]) -> str:
    llm = LLM(base(), max_model_len=128, lora_modules={"sum": sources})
    params = SamplingParams(max_tokens=12, temperature=0)
    return llm.generate(TEXT, params, lora_request="sum")[0].outputs[0].text


def test_generate_with_one_adapter_and_with_a_sum() -> None:
    plain, one = expected([(adapter(1), 0.0)]), expected([(adapter(1), 1.0)])
    both = expected([(adapter(1), 0.5), (adapter(2), -1.5)])
    assert len({plain, one, both}) == 3
    assert invoke("generate", TEXT, *OPTIONS) == plain + "\n"
    assert invoke("generate", TEXT, *OPTIONS, "--lora", str(adapter(1))) == one + "\n"
    scaled = ("--lora", f"{adapter(1)}:0.5", "--lora", f"{adapter(2)}:-1.5")
    assert invoke("generate", TEXT, *OPTIONS, *scaled) == both + "\n"
    record = json.loads(invoke("generate", TEXT, *OPTIONS, *scaled, "--json"))
    assert record["outputs"][0]["text"] == both


def test_chat_answers_with_the_adapter() -> None:
    asked = "the little fox\n"
    plain = invoke("chat", *OPTIONS, input=asked)
    assert invoke("chat", *OPTIONS, "--lora", str(adapter(1)), input=asked) != plain


def test_paths_and_scales_that_are_none() -> None:
    for text, message in ((f"{adapter(1)}:much", "the scale 'much' is no number"), ("none:2", "is no adapter"),
                          (f"{adapter(1)}:nan", "is no number")):  # fmt: skip
        result = CliRunner().invoke(build_app(), ["generate", "-m", str(base()), TEXT, "--lora", text])
        assert result.exit_code != 0
        assert message in result.output or (isinstance(result.exception, BifolioError)
                                            and message in str(result.exception))  # fmt: skip


def test_merge_writes_a_model_that_answers_like_the_base_with_its_adapters(tmp_path: Path) -> None:
    loras = ("--lora", f"{adapter(1)}:0.5", "--lora", f"{adapter(2)}:-1.5")
    params = SamplingParams(max_tokens=12, temperature=0, logprobs=0)

    def tokens(llm: LLM) -> list[tuple[int, float]]:
        output = llm.generate([[5, 6, 7]], params, lora_request=llm.lora)[0].outputs[0]
        assert output.logprobs is not None
        return [(token, found[token].logprob) for token, found in zip(output.token_ids, output.logprobs, strict=True)]

    beside = LLM(base(), max_model_len=128, lora_modules={"a": [(adapter(1), 0.5), (adapter(2), -1.5)]})
    beside.lora = "a"
    expected_tokens = tokens(beside)
    for target in (tmp_path / "merged", tmp_path / "merged.gguf"):
        result = CliRunner().invoke(build_app(), ["merge", str(base()), str(target), *loras, "-f", "f32", "--json"])
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["rank"] == 8
        found = tokens(LLM(target, max_model_len=128))
        assert [token for token, _ in found] == [token for token, _ in expected_tokens]
        assert [score for _, score in found] == pytest.approx([score for _, score in expected_tokens], abs=1e-4)
    for arguments in ([], ["--lora", str(base())], ["--lora", str(adapter(1)), "-f", "q9"]):
        refused = CliRunner().invoke(build_app(), ["merge", str(base()), str(tmp_path / "none"), *arguments])
        assert refused.exit_code != 0
        assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("text", ["poems", "=path", "poems=", "a=b"])
def test_modules_of_a_server_are_name_and_path(text: str) -> None:
    twice = ["--lora-modules", text] * (2 if text == "a=b" else 1)
    result = CliRunner().invoke(build_app(), ["serve", "-m", str(base()), *twice])
    assert result.exit_code == 2
    assert "--lora-modules" in result.output


def test_modules_may_follow_one_mark_or_one_mark_each() -> None:
    """Both are read: the name that is given twice is named, and lies behind others."""
    pairs = [f"first={adapter(1)}", f"second={adapter(2)}", "second=elsewhere"]
    for words in (["--lora-modules", *pairs], [word for pair in pairs for word in ("--lora-modules", pair)]):
        result = CliRunner().invoke(build_app(), ["serve", *words, "-m", str(base())])
        assert result.exit_code == 2
        assert "names 'second' twice" in result.output
