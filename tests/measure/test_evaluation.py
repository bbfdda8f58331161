"""Certificates of evaluations: equal for every batch size, order, cache and engine, and verified by a second run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adapter_files import adapter_folder
from bifolio import LLM
from bifolio.cli.main import build_app
from bifolio.errors import ConfigError
from bifolio.measure.evaluation import Item, compare, evaluate, read_certificate, read_task, verify
from cli_runner import CliRunner, Result
from helpers import cpu_kernel_names, fresh_folder, tiny_folder, tiny_loaded

pytestmark = pytest.mark.skipif("native" not in cpu_kernel_names(), reason="bits are promised by the native kernels")
WORDS = ("fox", "wood", "book", "sea", "page", "cache", "token", "smile")


def lines(count: int = 24) -> list[dict[str, Any]]:
    rng, found = np.random.default_rng(3), []
    for number in range(count):
        words = [str(word) for word in rng.choice(WORDS, 6)]
        prompt = f"A {words[0]} and a {words[1]} in the {words[2]}:"
        if number % 2:
            found.append({"id": f"c{number}", "prompt": prompt, "choices": [f" {w}" for w in words[2:]], "answer": 1})
        else:
            found.append({"id": f"g{number}", "prompt": prompt, "answer": words[3], "match": "contains",
                          "max_tokens": 12})  # fmt: skip
    return found


def write_task(folder: Path, items: list[dict[str, Any]]) -> Path:
    path = folder / "task.jsonl"
    path.write_text("\n".join(json.dumps(item) for item in items))
    return path


def make_llm(**options: Any) -> LLM:
    settings = {"num_blocks": 60, "block_size": 4, "max_model_len": 96, "kernels": "native", "threads": 1}
    return LLM(tiny_loaded(tokenizer=True), **{**settings, **options})


def test_the_certificate_does_not_depend_on_the_batch(tmp_path: Path) -> None:
    items = read_task(write_task(tmp_path, lines()))
    first = evaluate(make_llm(max_num_seqs=1), items, "task")
    crowded = make_llm(max_num_seqs=16, num_blocks=32)
    shuffled = [items[place] for place in np.random.default_rng(0).permutation(len(items))]
    assert evaluate(crowded, shuffled, "task") == first
    assert crowded.engine.stats().num_preemptions > 0
    warm = make_llm(max_num_seqs=6, num_blocks=300, chunk_size=8)
    assert evaluate(warm, items, "task") == first
    assert evaluate(warm, items, "task") == first  # its prompts are cached now
    assert warm.engine.stats().num_cached_tokens > 0
    assert first["task"]["items"] == len(items)
    assert 0 < first["score"]["correct"] < len(items)


def test_certificates_are_verified_and_changes_are_found(tmp_path: Path) -> None:
    items = read_task(write_task(tmp_path, lines(8)))
    found = json.loads(json.dumps(evaluate(make_llm(), items, "task")))
    verify(evaluate(make_llm(), items, "task"), found)
    with pytest.raises(ConfigError, match="another numerics"):
        verify(evaluate(make_llm(kv_cache_dtype="f16"), items, "task"), found)
    found["items"][0]["hash"] = "0" * 32
    with pytest.raises(ConfigError, match="has the answer"):
        verify(evaluate(make_llm(), items, "task"), found)
    file = tmp_path / "changed.json"
    file.write_text(json.dumps(found))
    with pytest.raises(ConfigError, match="was changed"):
        read_certificate(file)


def test_pairs_of_certificates() -> None:
    def certificate(right: str) -> dict[str, Any]:
        items = [{"id": str(n), "correct": one == "1", "answer": one, "hash": one} for n, one in enumerate(right)]
        return {"task": {"digest": "x"}, "items": items}

    found = compare(certificate("1111100000"), certificate("1100010000"))
    assert (found.both, found.neither, found.lost, found.won) == (2, 4, ["2", "3", "4"], ["5"])
    assert found.changed == ["2", "3", "4", "5"]
    assert found.p_value == pytest.approx(2 * (1 + 4) / 16)
    with pytest.raises(ConfigError, match="two tasks"):
        compare(certificate("1"), {"task": {"digest": "y"}, "items": []})


@pytest.mark.parametrize(("line", "reason"), [
    ({"prompt": "a"}, "answer"), ({"prompt": "a", "answer": 1}, "is a text"),
    ({"prompt": "a", "answer": 5, "choices": ["b"]}, "from 0 on"),
    ({"prompt": "a", "answer": "b", "colour": 1}, "colour"),
    ({"prompt": "a", "answer": "b", "match": "fuzzy"}, "fuzzy"),
])  # fmt: skip
def test_wrong_lines_are_refused_by_number(tmp_path: Path, line: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=f"line 2 of .*{reason}"):
        read_task(write_task(tmp_path, [{"prompt": "a", "answer": "b"}, line]))


@pytest.mark.parametrize(("match", "text", "answer", "right"), [
    ("exact", "7", "7", True), ("number", "so 3 and then 1,200.", "1200", True), ("number", "none", "1", False),
    ("contains", "a fox", "fox", True), ("begins", "foxes", "fox", True), ("begins", "a fox", "fox", False),
])  # fmt: skip
def test_matches(match: str, text: str, answer: str, right: bool) -> None:
    from bifolio.measure.evaluation import MATCHES

    assert MATCHES[match](text, answer) is right
    assert Item(prompt="a", answer=answer).match == "exact"


def run_cli(*arguments: str) -> Result:
    return CliRunner().invoke(build_app(["eval"]), ["eval", *arguments])


@pytest.mark.full
def test_the_verb(tmp_path: Path) -> None:
    model = str(tiny_folder(fresh_folder("evaluated"), tokenizer=True))
    other = str(tiny_folder(fresh_folder("evaluated"), tokenizer=True, seed=1))
    task, one, two = str(write_task(tmp_path, lines(6))), str(tmp_path / "one.json"), str(tmp_path / "two.json")
    done = run_cli("--task", task, "--model", model, "--certificate", one)
    assert "of 6 are right" in done.stdout, done.output
    again = run_cli("--task", task, "--model", model, "--verify", one, "--max-num-seqs", "2")
    assert "verified" in again.stdout, again.output
    assert isinstance(run_cli("--task", task, "--model", other, "--verify", one).exception, ConfigError)
    run_cli("--task", task, "--model", other, "--certificate", two)
    adapted = ["--model", model, "--lora", f"{adapter_folder(Path(model))}:2"]
    run_cli("--task", task, *adapted, "--certificate", two)
    assert "verified" in run_cli("--task", task, *adapted, "--verify", two, "--max-num-seqs", "1").stdout
    assert "another model" in str(run_cli("--task", task, "--model", model, "--verify", two).exception)
    paired = run_cli("compare", one, two)
    assert "exact test of McNemar" in paired.stdout, paired.output
    assert run_cli().exit_code == 2
