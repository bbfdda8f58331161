"""Damaged weights, whose outputs are NaN: every way to run a model ends with the named error, and none with a token."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from bifolio import LLM, BeamSearchParams, SamplingParams, SpeculativeConfig
from bifolio.engine.executor import DecodeExecutor, PrefillExecutor
from bifolio.errors import NO_FINITE_LOGIT, NO_FINITE_STATE, ModelOutputError
from bifolio.kernels.reference import ReferenceKernels
from bifolio.model.loader import load_model
from bifolio.pooling_params import PoolingParams
from helpers import make_runner, nan_folder, open_entry, random_prompt, tiny_loaded


@cache
def folder() -> Path:
    return nan_folder()


def new_llm(speculative: SpeculativeConfig | None = None) -> LLM:
    settings = {"num_blocks": 64, "block_size": 4, "max_model_len": 64, "max_num_seqs": 4}
    return LLM(folder(), kernels=ReferenceKernels(), speculative=speculative, **settings)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return new_llm()


@pytest.mark.parametrize(
    "options",
    [{"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.9}, {"n": 3}, {"logprobs": 2, "repetition_penalty": 1.3},
     {"prompt_logprobs": 1}, {"prompt_logprobs": 0, "max_tokens": 0}],
)  # fmt: skip
def test_generate(llm: LLM, options: dict[str, object]) -> None:
    output = llm.generate([[5, 6, 7, 5, 6]], SamplingParams(**options))[0]  # type: ignore[arg-type]
    assert output.error == NO_FINITE_LOGIT
    assert {completion.finish_reason for completion in output.outputs} == {"error"}
    assert not llm.engine.requests
    assert llm.engine.blocks.num_used_blocks == 0


@pytest.mark.parametrize("options", [{}, {"logprobs": 1}, {"num_groups": 2, "diversity_penalty": 0.5}])
def test_a_beam_search(llm: LLM, options: dict[str, object]) -> None:
    for _ in range(2):
        output = llm.beam_search([[5, 6, 7]], BeamSearchParams(2, **options))[0]  # type: ignore[arg-type]
        assert output.error == NO_FINITE_LOGIT
        assert [completion.finish_reason for completion in output.outputs] == ["error"]
        assert not llm.engine.requests
        assert llm.engine.blocks.num_used_blocks == 0


def test_drafts() -> None:
    llm = new_llm(SpeculativeConfig("ngram", adaptive=False))
    assert llm.generate([[5, 6] * 4], SamplingParams(temperature=0.0))[0].error == NO_FINITE_LOGIT


def test_a_decode_executor() -> None:
    model = load_model(folder())
    runner, blocks = make_runner(model)
    entry = open_entry(runner, blocks)
    PrefillExecutor(runner).append([entry], [[5, 6, 7]])
    with pytest.raises(ModelOutputError, match="no finite logit"):
        DecodeExecutor(runner).step(entry, 8)


def test_one_nan_logit_is_excluded(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, blocks = make_runner(tiny_loaded())
    executor = DecodeExecutor(runner)
    logits = np.array([0.5, np.nan, 2.0, 1.0], np.float32)
    monkeypatch.setattr(executor, "logits", lambda *_: logits)
    assert executor.step(open_entry(runner, blocks), 3) == 2


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_language_model(temperature: float) -> None:
    torch = pytest.importorskip("torch")
    from bifolio import LanguageModel
    from bifolio.api.decode_loop import TokenChooser

    model = LanguageModel.from_pretrained(folder())
    for decode in (model.decode, model.decode_by_recomputing):
        with pytest.raises(ModelOutputError, match="no finite logit"):
            decode(torch.tensor([[5, 6, 7]]), 2, temperature, seed=1)
    choose = TokenChooser(temperature, None, None, 1, torch.device("cpu"))
    logits = torch.tensor([[float("nan"), -torch.inf, 1.0, float("nan")]])
    assert choose(logits).tolist() == [2]


def test_embeddings(llm: LLM) -> None:
    request = llm.engine.add_request("one", random_prompt(9, vocab_size=61), PoolingParams())
    while llm.engine.has_work:
        llm.engine.step()
    assert request.pooling.value is None
    assert (request.fault, request.error) == (ModelOutputError.fault, NO_FINITE_STATE)
    with pytest.raises(ModelOutputError, match="hidden states that are not finite"):
        llm.embed([random_prompt(9, vocab_size=61)])
    assert llm.engine.blocks.num_used_blocks == 0
