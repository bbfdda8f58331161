"""Subsets of GSM8K and HumanEval: answers of a real model are equal in any batch, on any replica, cold or warm."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from serving import RunningServer, running_server

from bifolio import LLM
from bifolio.measure.evaluation import Certificate, Item, evaluate, verify
from bifolio.model.digests import digest_of_facts
from helpers import cpu_kernel_names

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif("native" not in cpu_kernel_names(), reason="bits are promised by the native kernels"),
]
MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"
NUM_ITEMS = 12  # of each set
MAX_TOKENS = 40


def gsm8k(data: Path) -> list[Item]:
    lines = [json.loads(line) for line in (data / "prompts/spec_bench.jsonl").read_text().splitlines()]
    problems = [line for line in lines if line["category"] == "math_reasoning"][:NUM_ITEMS]
    return [
        Item(id=f"gsm8k/{line['question_id']}", prompt=f"Question: {line['turns'][0]}\nAnswer:",
             answer=line["reference"][0].split("####")[-1].strip(), match="number", max_tokens=MAX_TOKENS,
             stop=["Question:", "\n\n"]) for line in problems
    ]  # fmt: skip


def human_eval(data: Path) -> list[Item]:
    path = data / "prompts/human_eval.jsonl"
    if not path.is_file():
        pytest.skip("the folder of BIFOLIO_TEST_DATA has no prompts/human_eval.jsonl")
    problems = [json.loads(line) for line in path.read_text().splitlines()[:NUM_ITEMS]]
    stops = ["\nclass", "\ndef", "\n#", "\nif", "\nprint"]
    return [
        Item(id=line["task_id"], prompt=line["prompt"], answer=line["canonical_solution"], match="exact",
             max_tokens=MAX_TOKENS, stop=stops) for line in problems
    ]  # fmt: skip


def answer_of(server: RunningServer, item: Item) -> str:
    """The hash of an answer of a server, without the settings that the model recommends."""
    body = {"prompt": item.prompt, "max_tokens": item.max_tokens, "stop": item.stop, "temperature": 0,
            "dry_multiplier": 0, "return_token_ids": True}  # fmt: skip
    with server.http() as http:
        answer = http.post("/v1/completions", json=body, timeout=600)
        assert answer.status_code == 200, answer.text
        return digest_of_facts(answer.json()["choices"][0]["token_ids"])


@pytest.mark.parametrize("make_items", [gsm8k, human_eval])
def test_answers_are_equal_in_any_batch(make_items: Any, data_dir: Path, models_dir: Path) -> None:
    if not (models_dir / MODEL).is_file():
        pytest.skip(f"the folder of BIFOLIO_TEST_MODELS has no {MODEL}")
    items = make_items(data_dir)

    def run(llm: LLM) -> Certificate:
        return evaluate(llm, items, "subset")

    with LLM(models_dir / MODEL, max_num_seqs=1, max_model_len=1024) as alone:
        expected = run(alone)
        cold = alone.engine.stats().num_cached_tokens
        assert run(alone) == expected
        assert alone.engine.stats().num_cached_tokens > cold  # warm
    for max_num_seqs, chunk_size in ((16, 64), (64, 16)):
        with LLM(models_dir / MODEL, max_num_seqs=max_num_seqs, max_model_len=1024, chunk_size=chunk_size) as llm:
            verify(run(llm), expected)
    engine = {"model": str(models_dir / MODEL), "max_model_len": 1024, "num_blocks": 2048, "kernels": "native"}
    with ExitStack() as stack:
        replicas = [stack.enter_context(running_server(engine=engine)) for _ in range(3)]
        with ThreadPoolExecutor(8) as pool:
            hashes = list(pool.map(lambda n: answer_of(replicas[n % 3], items[n]), range(len(items))))
    assert dict(zip([str(item.id) for item in items], hashes, strict=True)) == {
        str(one["id"]): one["hash"] for one in expected["items"]
    }
