"""Draft heads on a GPU that are often right: accepted drafts, and texts that are known (`benchmarks.predictable`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from benchmarks.predictable import FIRST, is_right, num_known, text_after, write_head, write_pair
from benchmarks.shapes import SHAPES, tiny
from bifolio import LLM, SamplingParams, SpeculativeConfig

CONFIG, SHARE, NUM_TOKENS = tiny(SHAPES["llama-8b"]), 0.6, 48
VOCAB = CONFIG.vocab_size


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("predictable")
    write_pair(folder / "pair", CONFIG, SHARE)
    write_head(folder / "head", CONFIG, SHARE)
    return folder


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("method", ["eagle", "mtp"])
def test_right_drafts_are_accepted(
    method: Literal["eagle", "mtp"], deterministic: bool, models: Path, gpu_kernels: Callable[..., Any]
) -> None:
    """Greedy and sampled sequences, with and without logprobs; some texts end before others."""
    draft = str(models / "head") if method == "eagle" else None
    config = SpeculativeConfig(method, length=3, draft_model=draft, adaptive=False)
    kernels = gpu_kernels("bf16", deterministic=deterministic)
    llm = LLM(str(models / "pair"), kernels=kernels, num_blocks=256, max_model_len=160, max_num_seqs=8,
              speculative=config, warm_up=False)  # fmt: skip
    assert llm.engine.speculator is not None
    half, stats = num_known(VOCAB) // 2, llm.engine.speculator.stats
    firsts = [FIRST, FIRST + 60, FIRST + 120, half + FIRST, half + FIRST + 80]
    params = [
        SamplingParams(
            temperature=0.7 * (number % 2), seed=number, max_tokens=NUM_TOKENS - 5 * number, ignore_eos=True,
            logprobs=None if number < 4 else 1,
        )
        for number in range(len(firsts))
    ]  # fmt: skip
    outputs = llm.generate([[9, 33, first] for first in firsts], params, use_tqdm=False)
    for first, each, output in zip(firsts, params, outputs, strict=True):
        assert output.outputs[0].token_ids == text_after(first, each.max_tokens, VOCAB)
    assert is_right(VOCAB, SHARE)[FIRST:half].mean() > 0.5
    assert stats.num_accepted_tokens > 0.2 * stats.num_draft_tokens
    assert llm.engine.stats().num_steps < NUM_TOKENS + 6  # that of a text whose drafts are all wrong
    (alone,) = llm.generate([[5, 6, FIRST]], params[0], use_tqdm=False)
    assert alone.outputs[0].token_ids == text_after(FIRST, NUM_TOKENS, VOCAB)
