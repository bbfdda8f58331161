"""Tensor parallelism: several processes give the tokens and logprobs of one; a lost process ends the engine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from adapter_files import peft_adapter
from bifolio import LLM, BeamSearchParams, LoRARequest, SamplingParams, SpeculativeConfig
from bifolio.errors import ConfigError, RankLostError
from bifolio.model.gguf.mixes import parse_mix
from bifolio.model.gguf.writer import write_gguf
from bifolio.model.loader import load_model
from bifolio.sampling.grammar import Grammar
from helpers import cpu_kernel_names, fresh_folder, random_prompt, tiny_folder, tiny_model

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif("native" not in cpu_kernel_names(), reason="the ranks need the compiled extension"),
]
PROMPTS = [random_prompt(21, seed=1, vocab_size=61), random_prompt(5, seed=2, vocab_size=61), [7, 8, 7, 8, 7, 8, 7]]
NGRAM = SpeculativeConfig("ngram", adaptive=False)


@cache
def model_of(name: str) -> Path:
    if name == "deepseek2 with plain queries":
        return tiny_model("deepseek2", vocab_size=61, q_lora_rank=None)[1]
    if name == "olmo2 with one kv head":
        return tiny_model("olmo2", vocab_size=61, num_key_value_heads=1)[1]
    # experts; experts with biases, and attention sinks; latents, also with indexers; norms over all heads, with experts
    if name in ("qwen3moe", "gptoss", "deepseek2", "glmdsa", "olmo2", "olmoe"):
        return tiny_model(name, vocab_size=61)[1]
    if name == "qwen3":  # per-head norms, and heads of another width than hidden_size / num_heads
        return tiny_model("qwen3", vocab_size=61)[1]
    if name == "phi3":  # fused qkv and gate_up
        return tiny_model("phi3", vocab_size=61)[1]
    if name == "llama":
        return tiny_folder(tokenizer=True, seed=5, num_attention_heads=4, num_key_value_heads=2)
    if name == "three kv heads":
        return tiny_folder(seed=7, hidden_size=48, num_attention_heads=6, num_key_value_heads=3)
    if name == "one kv head":
        return tiny_folder(seed=6, num_attention_heads=4, num_key_value_heads=1, tie_word_embeddings=True)
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 2, "vocab_size": 200}
    path = fresh_folder("shards") / f"{name}.gguf"
    write_gguf(path, load_model(tiny_folder(seed=3, **sizes)), parse_mix(name))
    return path


def make_llm(name: str, size: int, **options: Any) -> LLM:
    sizes = {
        "num_blocks": 80,
        "block_size": 4,
        "max_model_len": 96,
        "chunk_size": 8,
        "max_num_seqs": 8,
        "threads": size,
    }
    return LLM(model_of(name), tensor_parallel_size=size, poison_free_blocks=True, **{**sizes, **options})


def essence(outputs: list[Any]) -> list[Any]:
    return [
        [(each.token_ids, each.finish_reason, each.cumulative_logprob, each.logprobs) for each in output.outputs]
        for output in outputs
    ]


def workload(llm: LLM) -> list[Any]:
    """Greedy and sampled requests, several completions, beams, prompt logprobs, and a second turn on cached blocks."""
    kinds = [
        SamplingParams(max_tokens=9, temperature=0.0, logprobs=3, ignore_eos=True),
        SamplingParams(max_tokens=9, temperature=0.9, seed=4, n=3, logprobs=1, ignore_eos=True),
        SamplingParams(max_tokens=6, temperature=0.7, top_p=0.9, repetition_penalty=1.2, seed=5, prompt_logprobs=1),
    ]
    found: list[Any] = []
    prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = llm.generate(prompts, kinds)
    found += [essence(outputs), outputs[2].prompt_logprobs]
    found.append(essence(llm.beam_search(prompts[:2], BeamSearchParams(beam_width=3, max_tokens=6))))
    longer: list[Any] = [{"prompt_token_ids": [*PROMPTS[0], 9, 10, 11]}]
    again = llm.generate(longer, kinds[0])
    assert (again[0].num_cached_tokens or 0) >= 16  # the prefix is reused on every rank
    return [*found, essence(again)]


@cache
def expected(name: str, kernels: str) -> list[Any]:
    with make_llm(name, 1, kernels=kernels) as llm:
        return workload(llm)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "name",
    [
        "llama", "qwen3", "phi3", "one kv head", "three kv heads", "q4_k_m", "q8_0", "qwen3moe", "gptoss",
        "deepseek2", "deepseek2 with plain queries", "glmdsa", "olmo2", "olmo2 with one kv head", "olmoe",
    ],
)  # fmt: skip
def test_two_ranks_give_the_bits_of_one(name: str) -> None:
    with make_llm(name, 2, kernels="native") as llm:
        assert workload(llm) == expected(name, "native")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["llama", "q4_k_m", "deepseek2", "olmo2"])
def test_four_ranks_give_the_bits_of_one(name: str) -> None:
    with make_llm(name, 4, kernels="native") as llm:
        assert workload(llm) == expected(name, "native")


def test_numpy_kernels_give_the_tokens_of_one() -> None:
    """Their sums are numpy's: some of its libraries add the columns of a narrower matrix in another order."""
    wanted = expected("llama", "reference")
    with make_llm("llama", 2, kernels="reference") as llm:
        found = workload(llm)
    assert tokens_of(found) == tokens_of(wanted)
    scores = [[each[2] for output in run[0] for each in output] for run in (found, wanted)]
    assert scores[0] == pytest.approx(scores[1], abs=1e-4)


def test_torch_kernels_exchange_through_gloo() -> None:
    pytest.importorskip("torch")
    for _ in range(2):  # a closed engine leaves its group, so that the next one can have another
        with make_llm("qwen3", 2, kernels="torch") as llm:
            assert tokens_of(workload(llm)) == tokens_of(expected("qwen3", "torch"))


def tokens_of(found: list[Any]) -> list[Any]:
    """The token ids of a workload; torch's products round differently by the number of rows."""
    return [[each[0] for output in part for each in output] for part in (found[0], found[2], found[3])]


@pytest.mark.parametrize("name", ["llama", "q8_0", "qwen3moe", "deepseek2", "olmo2"])
def test_added_parts_give_nearly_the_same_logprobs(name: str) -> None:
    """Without `deterministic` the ranks add their parts of a sum, in another order than one process."""
    greedy = SamplingParams(max_tokens=8, temperature=0.0, logprobs=0, ignore_eos=True)
    prompt: Any = {"prompt_token_ids": PROMPTS[0]}
    found = []
    for size in (1, 2):
        with make_llm(name, size, deterministic=False) as llm:
            layer = llm.engine.runner.weights.layers[0]
            shards = layer.down.shards if layer.moe is None else layer.moe.shards
            assert (shards is not None and not shards.outputs) == (size == 2)
            found.append(llm.generate(prompt, greedy)[0].outputs[0])
    assert found[0].token_ids == found[1].token_ids
    sums = [each.cumulative_logprob for each in found]
    assert sums[1] == pytest.approx(sums[0], rel=5e-2 if name == "q8_0" else 1e-4)


def test_drafts_grammar_and_preemption() -> None:
    grammar = Grammar.regex("(the|fox|read| )+")
    params = [
        SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True),
        SamplingParams(max_tokens=12, temperature=0.8, seed=3, grammar=grammar),
        SamplingParams(max_tokens=24, temperature=0.8, seed=9, ignore_eos=True),
    ]
    texts = ["the fox read the fox read the", "read", "the little fox"]
    with make_llm("llama", 1) as llm:
        alone = [essence(llm.generate(text, each)) for text, each in zip(texts, params, strict=True)]
    with make_llm("llama", 2, num_blocks=14, max_model_len=40, speculative=NGRAM) as llm:
        together = llm.generate(texts, params)
        assert [[each] for each in essence(together)] == alone
        stats = llm.engine.stats()
        assert llm.engine.speculator is not None
        assert llm.engine.speculator.stats.num_accepted_tokens > 0
        assert stats.num_preemptions > 0


# -- faults -----------------------------------------------------------------------------------------------------------
@pytest.fixture
def pair() -> Iterator[LLM]:
    llm = make_llm("llama", 2)
    yield llm
    llm.close()


def test_a_killed_rank_ends_the_engine_with_a_clear_error(pair: LLM) -> None:
    team: Any = pair.engine.runner.peers
    process = next(iter(team._watch._processes.values()))
    stream = pair.stream("the fox", SamplingParams(max_tokens=80, ignore_eos=True))
    next(iter(stream))
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(RankLostError, match="rank 1 was killed by signal 9"):
        list(stream)
    with pytest.raises(RankLostError):
        pair.generate("the fox")


def test_a_pass_that_fails_on_one_rank_is_discarded_on_all(pair: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 runs out of memory in its part, while rank 1 waits for it in an exchange; the request goes on."""
    params = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
    wanted = pair.generate("the fox", params)[0].outputs[0].token_ids
    executor, failures = pair.engine.decode_executor, [2]
    honest = executor._run

    def failing(batch: Any) -> Any:
        if failures[0]:
            failures[0] -= 1
            raise RuntimeError("CUDA error: out of memory")
        return honest(batch)

    monkeypatch.setattr(executor, "_run", failing)
    assert pair.generate("the fox", params)[0].outputs[0].token_ids == wanted
    assert not failures[0]
    assert pair.generate("a fox", params)[0].outputs[0].finish_reason == "length"


def test_an_error_of_another_rank_is_named(pair: LLM, caplog: pytest.LogCaptureFixture) -> None:
    """Rank 1 refuses a move to a block that does not exist: the step fails on all ranks, its second trial does not."""
    params = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
    wanted = pair.generate("the fox", params)[0].outputs[0].token_ids
    pair.engine.storages[1].move_blocks([(1, 1 << 40)])
    with caplog.at_level("WARNING"):
        assert pair.generate("the fox", params)[0].outputs[0].token_ids == wanted
    assert "rank 1: IndexError" in caplog.text
    assert pair.generate("the fox", params)[0].outputs[0].token_ids == wanted


def test_processes_end_with_the_engine() -> None:
    """No process of a rank is left, whether the engine is closed, forgotten, or killed."""
    script = f"""
import sys, time
from bifolio import LLM
llm = LLM({str(model_of("llama"))!r}, tensor_parallel_size=2, num_blocks=40, block_size=4, max_model_len=64)
print(*llm.engine.runner.peers._watch.pids, flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        process.kill()
    assert pids
    wait_for_end(pids)
    llm = make_llm("llama", 2)
    team: Any = llm.engine.runner.peers
    llm.close()
    wait_for_end(team._watch.pids)


def wait_for_end(pids: list[int]) -> None:
    for _ in range(100):
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            return
        time.sleep(0.1)
    raise AssertionError("a process of a rank is still there")


# -- refusals ---------------------------------------------------------------------------------------------------------
def test_sizes_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="use one of 1, 2, 4"):
        make_llm("llama", 3)
    with pytest.raises(ConfigError, match="from 1 to"):
        make_llm("llama", 0)
    with pytest.raises(ConfigError, match="blocks"):
        make_llm("llama", 2, num_blocks=None, memory=1000)


@pytest.mark.parametrize("name", ["llama", "qwen3moe", "deepseek2", "one kv head"])
def test_adapters_give_the_bits_of_one_process(name: str) -> None:
    """Several adapters in a batch, their sum, and one that is loaded and dropped while the ranks run."""
    pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    folder = model_of(name)
    model = AutoModelForCausalLM.from_pretrained(folder)
    targets = "all-linear" if name != "deepseek2" else ["q_b_proj", "kv_a_proj_with_mqa", "o_proj"]
    adapters = {f"a{seed}": str(peft_adapter(model, seed, target_modules=targets)[1]) for seed in (1, 2)}
    modules: dict[str, Any] = {**adapters, "sum": [(path, 0.5) for path in adapters.values()]}
    params = SamplingParams(max_tokens=7, temperature=0.0, logprobs=2, ignore_eos=True)
    prompts, names = [{"prompt_token_ids": PROMPTS[0]}] * 4, [None, "a1", "a2", "sum"]
    found = []
    for size in (1, 2):
        with make_llm(name, size, lora_modules=modules) as llm:
            outputs = essence(llm.generate(prompts, params, lora_request=names))
            late = LoRARequest("late", 9, adapters["a2"])
            outputs += essence(llm.generate(prompts[0], params, lora_request=late))
            llm.engine.adapters.unload("late")
            outputs += essence(llm.generate(prompts[0], params))
            found.append(outputs)
    one, two = found
    assert one == two
    assert one[4] == one[2]
    assert len({str(each) for each in one[:4]}) == 4
