"""Tensor parallelism of recurrent layers: ranks share heads or channels and give the bits of one process."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from family_rows import row_folder

from bifolio import LLM, BeamSearchParams, SamplingParams, SpeculativeConfig
from bifolio.errors import ConfigError
from bifolio.model.shards import check_size, shard
from helpers import cpu_kernel_names, random_prompt
from hybrid_models import hybrid_config, spaced_checkpoints, tiny_hybrid

needs_ranks = pytest.mark.skipif("native" not in cpu_kernel_names(), reason="the ranks need the compiled extension")
PROMPTS = [random_prompt(29, seed=1, vocab_size=60), random_prompt(5, seed=2, vocab_size=60), [7, 8, 7, 8, 7, 8, 7]]
KINDS = [
    SamplingParams(max_tokens=9, temperature=0.0, logprobs=3, ignore_eos=True),
    SamplingParams(max_tokens=9, temperature=0.9, seed=4, n=3, logprobs=1, ignore_eos=True),
    SamplingParams(max_tokens=12, temperature=0.7, top_p=0.9, seed=5, prompt_logprobs=1, ignore_eos=True),
]
NGRAM = SpeculativeConfig("ngram", adaptive=False)


def make_llm(name: str, size: int, **options: Any) -> LLM:
    sizes = {"num_blocks": 80, "block_size": 4, "max_model_len": 96, "chunk_size": 8, "max_num_seqs": 8,
             "kernels": "native"}  # fmt: skip
    with spaced_checkpoints(8):
        return LLM(row_folder(name)[1], tensor_parallel_size=size, threads=size, **{**sizes, **options})


def workload(llm: LLM) -> list[Any]:
    """Several requests together, a beam search, and a second turn that begins at a checkpoint."""
    prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = llm.generate(prompts, KINDS, use_tqdm=False)
    outputs += llm.beam_search(prompts[1:2], BeamSearchParams(beam_width=2, max_tokens=4))
    longer: list[Any] = [{"prompt_token_ids": [*PROMPTS[0], 9, 10, 11]}]
    again = llm.generate(longer, KINDS[0], use_tqdm=False)
    assert (again[0].num_cached_tokens or 0) >= 16  # blocks and states on every rank
    return [
        [(each.token_ids, each.cumulative_logprob, each.logprobs) for each in output.outputs]
        for output in [*outputs, *again]
    ] + [outputs[2].prompt_logprobs]


@cache
def expected(name: str) -> list[Any]:
    with make_llm(name, 1) as llm:
        return workload(llm)


@pytest.mark.sampled(3)
@pytest.mark.full
@needs_ranks
@pytest.mark.parametrize("name", ["lfm2", "lfm3", "qwen3next", "qwen35", "falcon_h1", "nemotron_h", "kimi_linear"])
def test_two_ranks_give_the_bits_of_one(name: str) -> None:
    with make_llm(name, 2) as llm:
        assert workload(llm) == expected(name)


@pytest.mark.full
@needs_ranks
def test_a_group_of_keys_on_several_ranks_and_drafts() -> None:
    """Two groups of keys on four ranks; drafts write states of their own."""
    with make_llm("qwen3next", 4, speculative=NGRAM) as llm:
        found = llm.generate([{"prompt_token_ids": PROMPTS[2]}], KINDS[0], use_tqdm=False)[0].outputs[0]
        assert llm.engine.speculator is not None
        assert llm.engine.speculator.stats.num_draft_tokens > 0
    with make_llm("qwen3next", 1) as llm:
        alone = llm.generate([{"prompt_token_ids": PROMPTS[2]}], KINDS[0], use_tqdm=False)[0].outputs[0]
    assert (found.token_ids, found.logprobs) == (alone.token_ids, alone.logprobs)


@pytest.mark.full
@needs_ranks
@pytest.mark.parametrize("name", ["qwen3next", "nemotron_h"])
def test_added_parts_give_nearly_the_same_logprobs(name: str) -> None:
    found = []
    for size in (1, 2):
        with make_llm(name, size, deterministic=False) as llm:
            found.append(llm.generate([{"prompt_token_ids": PROMPTS[0]}], KINDS[0], use_tqdm=False)[0].outputs[0])
    assert found[0].token_ids == found[1].token_ids
    assert found[1].cumulative_logprob == pytest.approx(found[0].cumulative_logprob, rel=1e-3)


@pytest.mark.parametrize("kind", ["conv", "delta", "mamba", "wide conv"])
def test_every_row_is_on_one_rank(kind: str) -> None:
    """The rows and channels of two ranks together are those of the layer; states are half as large."""
    model = tiny_hybrid(kind)
    parts = [shard(model.weights, rank, 2, exact=True) for rank in range(2)]
    whole = model.weights.layers[0].recurrent
    assert whole is not None
    layers: list[Any] = [part.layers[0].recurrent for part in parts]
    assert sum(layer.input.out_features for layer in layers) == whole.input.out_features
    assert [layer.recurrence.in_features for layer in layers] == [layer.input.out_features for layer in layers]
    assert [len(layer.recurrence.conv_weight) for layer in layers] == [whole.recurrence.channels // 2] * 2
    sizes = [part.config.recurrent.channels for part in parts]  # type: ignore[union-attr]
    assert sizes == [whole.recurrence.channels // 2] * 2


def test_low_rank_products_are_whole_on_every_rank() -> None:
    """The first halves of the products of low rank; their second halves have the rows of a rank's heads."""
    model, rank = tiny_hybrid("keyed"), 6
    whole = model.weights.layers[0].recurrent
    assert whole is not None
    assert whole.keyed is not None
    for number in range(2):
        part: Any = shard(model.weights, number, 2, exact=True).layers[0].recurrent
        assert part.input.out_features == whole.input.out_features // 2 + rank
        assert part.recurrence.out_features == whole.recurrence.out_features // 2
        for ours, theirs in zip(part.keyed.linears, whole.keyed.linears, strict=True):
            rows = slice(number * theirs.out_features // 2, (number + 1) * theirs.out_features // 2)
            np.testing.assert_array_equal(ours.parts[0], theirs.parts[0][rows])
        biases = np.split(whole.recurrence.bias, 2)
        np.testing.assert_array_equal(part.recurrence.bias, biases[number])


def test_sizes_that_cannot_work_are_refused() -> None:
    def changed(kind: str, **changes: Any) -> Any:
        config = hybrid_config(kind, num_heads=12, num_kv_heads=12)
        assert config.recurrent is not None
        return replace(config, recurrent=replace(config.recurrent, **changes))

    with pytest.raises(ConfigError, match="use one of 1, 2, 4"):
        check_size(changed("delta"), 3)
    with pytest.raises(ConfigError, match="order of recurrent heads"):
        check_size(changed("delta", tiled=True), 2)
    with pytest.raises(ConfigError, match="must divide the 1 groups"):
        check_size(changed("mamba", norm_groups=1), 2)
    with pytest.raises(ConfigError, match="must divide the 1 groups"):
        check_size(changed("lightning"), 2)
    with pytest.raises(ConfigError, match="linear recurrent units are not shared"):
        check_size(changed("lru"), 2)
    with pytest.raises(ConfigError, match="layers of RWKV are not shared"):
        check_size(changed("rwkv"), 2)
    check_size(changed("mamba", norm_groups=1, has_norm=False), 2)
    check_size(changed("conv"), 3)
