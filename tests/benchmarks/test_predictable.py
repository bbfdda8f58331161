"""The model of known text: every engine writes it, and heads are right after the tokens that they should be."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from benchmarks.predictable import FIRST, is_right, num_known, text_after, write_head, write_pair
from benchmarks.shapes import SHAPES, tiny
from bifolio import LLM, SamplingParams, SpeculativeConfig

CONFIG = tiny(SHAPES["llama-8b"])
VOCAB = CONFIG.vocab_size


@pytest.mark.full
@pytest.mark.parametrize("method", ["eagle", "mtp"])
def test_heads_are_right_after_some_tokens(method: Literal["eagle", "mtp"], tmp_path: Path) -> None:
    write_pair(tmp_path / "pair", CONFIG, 0.6)
    write_head(tmp_path / "head", CONFIG, 0.6)
    draft = str(tmp_path / "head") if method == "eagle" else None
    config = SpeculativeConfig(method, length=1, draft_model=draft, adaptive=False)
    llm = LLM(str(tmp_path / "pair"), device="cpu", threads=1, num_blocks=64, max_model_len=128, speculative=config)
    assert llm.engine.speculator is not None
    stats, half, number = llm.engine.speculator.stats, num_known(VOCAB) // 2, 40
    params = SamplingParams(temperature=0.0, max_tokens=number, ignore_eos=True, logprobs=None)
    for first in (FIRST, half + FIRST):
        stats.num_draft_tokens = stats.num_accepted_tokens = 0
        (output,) = llm.generate([[9, 33, first]], params, use_tqdm=False)
        assert output.outputs[0].token_ids == text_after(first, number, VOCAB)
        assert stats.num_draft_tokens > 10
        place, accepted = first + 2, 0  # the first draft follows the first two tokens of the text
        for _ in range(stats.num_draft_tokens):
            right = bool(is_right(VOCAB, 0.6)[place - 1])
            accepted, place = accepted + right, place + 1 + right
        assert stats.num_accepted_tokens == accepted
