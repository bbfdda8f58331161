"""Receipts: answers of a mixed load are given again bit for bit, and a planted change is found with its place."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adapter_files import adapter_folder
from bifolio import LLM, BeamSearchParams, Grammar, SamplingParams, SpeculativeConfig
from bifolio.api.receipts import checked_receipt, read_receipt
from bifolio.cli.main import build_app
from bifolio.errors import ConfigError, RequestError
from bifolio.kernels.operation_hook import hooked
from bifolio.kernels.select import select_kernels
from bifolio.measure.replay import check_identity, compare_operations, replay
from bifolio.model.digests import digest_of_facts
from bifolio.model.loaded import LoadedModel
from cli_runner import CliRunner, Result
from helpers import cpu_kernel_names, fresh_folder, tiny_folder, tiny_loaded
from vision.vision_models import gemma3_model, picture

pytestmark = pytest.mark.skipif("native" not in cpu_kernel_names(), reason="bits are promised by the native kernels")
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 999}}, "required": ["a"]}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def make_llm(model: LoadedModel | None = None, **options: Any) -> LLM:
    settings = {"num_blocks": 40, "block_size": 4, "max_model_len": 96, "max_num_seqs": 6, "chunk_size": 16,
                "kernels": "native", "threads": 1}  # fmt: skip
    return LLM(model or tiny_loaded(tokenizer=True), **{**settings, **options})


def mixed(rng: np.random.Generator) -> SamplingParams:
    """Parameters of one request of a mixed load."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.8, "logprobs": 2}, {"temperature": 1.2, "min_p": 0.05},
        {"temperature": 0.8, "presence_penalty": 0.4, "repetition_penalty": 1.1}, {"temperature": 1.0, "n": 3},
        {"temperature": 0.7, "dry_multiplier": 0.8}, {"temperature": 1.0, "grammar": Grammar.json_schema(SCHEMA)},
        {"temperature": 0.9, "best_of": 3, "n": 1}, {"temperature": 0.6, "stop": ("e", "th"), "bad_words": ("the",)},
        {"temperature": 0.9, "logit_bias": {7: 2.5, 9: -3.0}, "seed": 4},
    ]  # fmt: skip
    return SamplingParams(max_tokens=int(rng.integers(1, 24)), **kinds[int(rng.integers(len(kinds)))])


def run_load(count: int, seed: int) -> int:
    rng = np.random.default_rng(seed)
    loaded = make_llm(speculative=SpeculativeConfig("ngram", length=3))
    prompts = [{"prompt_token_ids": [int(t) for t in rng.integers(3, 250, rng.integers(2, 40))]} for _ in range(count)]
    outputs = loaded.generate(prompts, [mixed(rng) for _ in range(count)], receipts=True, use_tqdm=False)
    preemptions = loaded.engine.stats().num_preemptions
    idle = make_llm(num_blocks=400, max_num_seqs=16, chunk_size=64)
    for output in outputs:
        assert output.receipt is not None
        stored = json.loads(json.dumps(output.receipt))
        found = replay(idle, stored)
        assert found.is_equal, (stored["request"], found.mismatch)
        assert found.token_ids == [one.token_ids for one in output.outputs]
    return preemptions


def test_answers_of_a_mixed_load_are_given_again() -> None:
    assert run_load(40, 1) > 0  # sequences were preempted


@pytest.mark.slow
def test_five_hundred_answers_are_given_again() -> None:
    assert sum(run_load(100, seed) for seed in range(2, 7)) > 0


def test_beams_and_branches_have_receipts() -> None:
    llm = make_llm(num_blocks=200)
    [request] = llm.run_requests(
        [lambda engine, name: engine.add_request(name, [5, 6, 7], BeamSearchParams(beam_width=3, max_tokens=6))]
    )
    assert replay(llm, llm.receipt(request)).is_equal
    tokens = [5, 9, 11, 40, 41]
    [request] = llm.run_requests(
        [
            lambda engine, name: engine.add_request(
                name, tokens, SamplingParams(seed=3, presence_penalty=1.0), num_given=2
            )
        ]
    )
    receipt = llm.receipt(request)
    assert receipt["request"]["prompt_token_ids"] == tokens
    assert replay(llm, receipt).is_equal


def test_foreign_and_changed_receipts_are_refused() -> None:
    llm = make_llm()
    [output] = llm.generate("Once", GREEDY, receipts=True)
    receipt: dict[str, Any] = output.receipt or {}
    norm = llm.model.weights.final_norm
    weights = replace(llm.model.weights, final_norm=replace(norm, weight=norm.weight * np.float32(1.001)))
    with pytest.raises(ConfigError, match="of another model"):
        check_identity(make_llm(replace(llm.model, weights=weights)), receipt)
    with pytest.raises(ConfigError, match="kv_dtype: f32 then, f16 now"):
        replay(make_llm(kv_cache_dtype="f16"), receipt)
    with pytest.raises(ConfigError, match="was changed"):
        checked_receipt({**receipt, "answer": []})
    with pytest.raises(ConfigError, match="no receipt of the format"):
        checked_receipt({"format": "other"})
    strange = {**receipt, "request": {**receipt["request"], "params": {"unheard_of": 1}}}
    strange["digest"] = digest_of_facts({key: value for key, value in strange.items() if key != "digest"})
    with pytest.raises(ConfigError, match="unheard_of"):
        replay(llm, strange)
    with pytest.raises(RequestError, match="Python functions"):
        llm.generate("Once", replace(GREEDY, logits_processors=(lambda ids, logits: logits,)), receipts=True)


def test_a_wrong_token_is_found_with_its_place() -> None:
    llm = make_llm()
    [output] = llm.generate("Once", GREEDY, receipts=True)
    receipt = json.loads(json.dumps(output.receipt))
    receipt["answer"][0]["token_ids"][5] += 1
    receipt["digest"] = digest_of_facts({key: value for key, value in receipt.items() if key != "digest"})
    mismatch = replay(llm, receipt).mismatch
    assert mismatch is not None
    assert (mismatch.completion, mismatch.position) == (0, 5)
    assert mismatch.expected == mismatch.found + 1 if mismatch.found is not None else False


def planted(layer: int, operation: str) -> Any:
    """Native kernels whose operation of this name gives another result in one layer."""
    calls = 0

    def hook(name: str, work: Any, *arguments: Any, **options: Any) -> Any:
        nonlocal calls
        result = work(*arguments, **options)
        if name == operation:
            if calls == layer:
                result = result * np.float32(1.0001)
            calls += 1
        return result

    kernels = select_kernels("cpu", name="native", threads=1)
    return hooked(kernels, hook, [operation], one_by_one=True)


@pytest.mark.parametrize(("layer", "operation"), [(0, "act_mul"), (1, "act_mul"), (1, "attend")])
def test_a_planted_change_is_found_with_its_layer_and_name(layer: int, operation: str) -> None:
    one, other = make_llm(), make_llm(kernels=planted(layer, operation))
    rows = compare_operations(one, other, [5, 9, 13, 40, 41, 42])
    first = next(row for row in rows if row.operation)
    assert (first.layer, first.operation) == (layer, operation)
    assert first.checksums[0] != first.checksums[1]
    assert all(row.drift == 0 for row in rows if row.layer < layer)
    assert rows[-1].drift > 0
    same = compare_operations(one, make_llm(), [5, 9, 13, 40, 41, 42])
    assert not any(row.operation or row.drift for row in same)


def run_cli(*arguments: str) -> Result:
    return CliRunner().invoke(build_app(["replay"]), arguments)


@pytest.mark.full
def test_the_verb(tmp_path: Path) -> None:
    folder = tiny_folder(fresh_folder("replayed"), tokenizer=True)
    llm = LLM(str(folder), kernels="native", max_model_len=64, num_blocks=64)
    [output] = llm.generate("Once upon", GREEDY, receipts=True)
    file = tmp_path / "answer.json"
    file.write_text(json.dumps({"id": "x", "receipt": output.receipt}))
    assert read_receipt(file) == output.receipt
    done = run_cli("replay", str(file), "--model", str(folder))
    assert done.exit_code == 0, done.output
    assert "equal: 8 tokens, bit for bit" in done.stdout
    other = tiny_folder(fresh_folder("replayed"), tokenizer=True, seed=1)
    refused = run_cli("replay", str(file), "--model", str(other))
    assert isinstance(refused.exception, ConfigError)
    assert "of another model" in str(refused.exception)
    compared = run_cli("replay", str(file), "--model", str(folder), "--against", str(other), "--json")
    assert compared.exit_code == 1, compared.output
    rows = json.loads(compared.stdout)["against"]["layers"]
    assert rows[0]["operation"] == "embed"


@pytest.mark.full
def test_adapters_and_images_are_passed_again(tmp_path: Path) -> None:
    adapted, looking = tiny_folder(fresh_folder("replayed"), tokenizer=True), gemma3_model()
    adapter, other = (str(adapter_folder(adapted, fresh_folder("replayed"), seed=seed)) for seed in (1, 2))
    files = [tmp_path / "one.png", tmp_path / "two.png"]
    for number, file in enumerate(files):
        picture(40, 40, number).save(file)
    one, two = map(str, files)
    answers = [
        (["--model", str(adapted), "--lora", f"{adapter}:0.5"], [["--lora", adapter], ["--lora", other], []]),
        (["--model", str(looking.folder), "--image", one, "--image", two], [["--image", two, "--image", one], []]),
    ]
    for number, (given, wrong) in enumerate(answers):
        receipts, limits = tmp_path / str(number), ["-n", "6", "--max-model-len", "200"]
        done = CliRunner().invoke(
            build_app(["generate"]), ["generate", *given, *limits, "Hi", "--receipts", str(receipts)]
        )
        assert done.exit_code == 0, done.output
        again = run_cli("replay", str(receipts / "1.json"), *given)
        assert again.exit_code == 0, again.output
        assert "equal: 6 tokens" in again.stdout
        for others in wrong:
            refused = run_cli("replay", str(receipts / "1.json"), *given[:2], *others)
            assert isinstance(refused.exception, ConfigError), others
    against = ["--against-kernels", "reference", "--json"]
    compared = run_cli("replay", str(tmp_path / "0" / "1.json"), *answers[0][0], *against)
    assert json.loads(compared.stdout)["against"]["layers"], compared.output
    refused = run_cli("replay", str(tmp_path / "1" / "1.json"), *answers[1][0], *against)
    assert "operations over images are not compared" in refused.output


@pytest.mark.full
def test_the_receipts_of_generate(tmp_path: Path) -> None:
    """One of each prompt of a file, one of a streamed text, one of a beam search."""
    folder = tiny_folder(fresh_folder("replayed"), tokenizer=True)
    idle = LLM(str(folder), kernels="native", max_model_len=64, num_blocks=64)
    source = tmp_path / "prompts.jsonl"
    source.write_text('{"prompt": "Once upon", "n": 2}\n{"prompt": "The fox"}\n')
    base = ["generate", "--model", str(folder), "-n", "6", "--max-model-len", "64"]
    for number, (more, count) in enumerate([
        (["--input", str(source)], 2), (["Once upon"], 1), (["--json", "Once upon"], 1), (["--beams", "2", "Once"], 1),
    ]):  # fmt: skip
        target = tmp_path / f"receipts-{number}"
        done = CliRunner().invoke(build_app(["generate"]), [*base, *more, "--receipts", str(target)])
        assert done.exit_code == 0, done.output
        assert sorted(path.name for path in target.iterdir()) == [f"{index}.json" for index in range(1, count + 1)]
        for path in target.iterdir():
            assert replay(idle, read_receipt(path)).is_equal
    taken = tmp_path / "file"
    taken.write_text("")
    refused = CliRunner().invoke(build_app(["generate"]), [*base, "--receipts", str(taken), "a"])
    assert refused.exit_code != 0
    assert "--receipts" in refused.output
