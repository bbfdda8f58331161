"""Vectors of encoders: against transformers for every family, pooling and kernel set, and bit by bit in any batch."""

from __future__ import annotations

import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from encoder_models import ENCODERS, TEXTS, add_modules, encoder_model, oracle_states, pool
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stand_in_slots import MeasuredStandIn

from bifolio import LLM, PoolingParams
from bifolio.errors import BifolioError, PromptTooLongError, RequestError, TokenIdError, UnsupportedModelError

SETS = ("native", "reference", "torch")


@cache
def llm_of(name: str, kernels: str = "native") -> LLM:
    return LLM(encoder_model(name)[1], kernels=kernels)


def vectors(llm: LLM, texts: Any, **options: Any) -> np.ndarray:
    return np.stack([result.outputs.data for result in llm.embed(texts, use_tqdm=False, **options)])


@pytest.mark.parametrize("kernels", SETS)
@pytest.mark.parametrize("name", ENCODERS)
def test_token_vectors_are_those_of_transformers(name: str, kernels: str) -> None:
    model, _ = encoder_model(name)
    llm = llm_of(name, kernels)
    results = llm.encode(list(TEXTS), PoolingParams(normalize=False))
    for text, result in zip(TEXTS, results, strict=True):
        expected = oracle_states(model, llm.model.require_tokenizer().encode(text))
        assert np.abs(result.outputs.data - expected).max() < 1e-5, text


@pytest.mark.parametrize("name", ENCODERS)
def test_a_device_plans_its_memory_by_a_measured_step(name: str) -> None:
    """Warmed up; its cache holds no more than two steps use."""
    options = {"max_model_len": 60, "token_budget": 100, "block_size": 4, "max_num_seqs": 4}
    with LLM(encoder_model(name)[1], kernels=MeasuredStandIn(), **options) as llm:
        assert llm.plan.step_bytes > 0
        assert llm.plan.num_blocks == 2 * (100 // 4 + 4 + 1)
        assert llm.engine.stats().num_prompt_tokens == 0
        assert np.abs(vectors(llm, list(TEXTS)) - vectors(llm_of(name, "reference"), list(TEXTS))).max() < 1e-5


@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_matrices_that_are_rounded_at_load_give_nearly_the_same_vectors(name: str) -> None:
    folder = encoder_model(name, hidden_size=64, intermediate_size=128)[1]
    with LLM(folder, quantization="q8_0") as llm, LLM(folder) as plain:
        assert llm.plan.weight_bytes < 0.5 * plain.plan.weight_bytes
        ours, exact = (vectors(each, list(TEXTS)) for each in (llm, plain))
    likeness = (ours * exact).sum(-1) / np.linalg.norm(ours, axis=-1) / np.linalg.norm(exact, axis=-1)
    assert likeness.min() > 0.99
    assert np.abs(ours - exact).max() > 1e-4


@pytest.mark.parametrize("mode", ["mean", "cls", "lasttoken"])
@pytest.mark.parametrize("normalize", [True, False])
def test_pooling_follows_the_modules_of_the_folder(mode: str, normalize: bool, tmp_path: Path) -> None:
    model, folder = encoder_model("bert")
    shutil.copytree(folder, tmp_path / "m")
    add_modules(tmp_path / "m", mode, normalize=normalize, max_length=40)
    with LLM(tmp_path / "m") as llm:
        tokenizer = llm.model.require_tokenizer()
        states = [oracle_states(model, tokenizer.encode(text)) for text in TEXTS]
        expected = np.stack([pool(each, mode, normalize=normalize) for each in states])
        assert np.abs(vectors(llm, list(TEXTS)) - expected).max() < 1e-5
        assert llm.engine.config.max_model_len == 40


@pytest.fixture(scope="module")
def llm() -> LLM:
    return llm_of("bert")


def test_dimensions_are_the_first_values_of_length_one(llm: LLM) -> None:
    whole = vectors(llm, TEXTS[1])[0]
    cut = vectors(llm, TEXTS[1], pooling_params=PoolingParams(dimensions=10))[0]
    assert np.abs(cut - whole[:10] / np.linalg.norm(whole[:10])).max() < 1e-6


def test_texts_and_token_ids_give_the_same_vectors(llm: LLM) -> None:
    tokenizer = llm.model.require_tokenizer()
    ids = [tokenizer.encode(text) for text in TEXTS]
    assert np.array_equal(vectors(llm, list(TEXTS)), vectors(llm, ids))
    assert np.array_equal(vectors(llm, ids[0]), vectors(llm, {"prompt_token_ids": ids[0]}))


def test_a_long_text_is_refused_or_cut(llm: LLM) -> None:
    with pytest.raises(PromptTooLongError, match=r"the text has 92 tokens and 64 fit.*truncate_prompt_tokens=-1"):
        llm.embed("fox " * 90)
    cut = llm.embed("fox " * 90, truncate_prompt_tokens=-1)[0]
    tokenizer = llm.model.require_tokenizer()
    assert cut.prompt_token_ids == tokenizer.encode("fox " * 62)
    assert llm.embed("a red fox runs", truncate_prompt_tokens=4)[0].prompt_token_ids == tokenizer.encode("a red")


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda llm: llm.generate("the fox"), "generates no text, because it has no language head: ask it for vectors"),
        (lambda llm: llm.classify("the fox"), "this model has no classifier: ask it for vectors"),
        (
            lambda llm: llm.embed("x", pooling_params=PoolingParams(dimensions=49)),
            "dimensions is 49: the vectors of this",
        ),
        (lambda llm: llm.embed("x", prompt_name="query"), "the model has no prompt 'query': it has none"),
        (lambda llm: llm.embed([{"text": "x"}]), "a prompt has no 'text'"),
        (lambda llm: llm.embed([{"prompt": 5}]), "a text to embed is a text or a list of token ids, not int"),
        (lambda llm: llm.embed("x", truncate_prompt_tokens=0), "truncate_prompt_tokens is 0"),
        (lambda llm: llm.embed([[]]), "pass at least one token"),
        (lambda llm: llm.embed("x", pooling_params={"dimensions": 4}), "pooling_params must be PoolingParams"),
        (lambda llm: llm.score(["a", "b"], ["c"]), "2 first texts and 1 second ones"),
        (lambda llm: PoolingParams(normalize=True, use_activation=False), "two names of one option"),
        (lambda llm: PoolingParams(task="rank"), "task is one of embed, token_embed, classify, score"),
    ],
)
def test_a_wrong_call_is_refused_with_the_reason(llm: LLM, call: Any, said: str) -> None:
    with pytest.raises(RequestError, match=re.escape(said)):
        call(llm)


def test_a_wrong_text_refuses_the_call_and_nothing_is_left_behind(llm: LLM) -> None:
    with pytest.raises(TokenIdError):
        llm.embed(["the fox", "a dog", [10**6]])
    assert not llm.engine.has_work
    assert not llm.engine.requests
    llm.engine.blocks.check_invariants()


def test_the_budget_of_a_step_holds_the_longest_text() -> None:
    folder = encoder_model("bert")[1]
    with pytest.raises(
        BifolioError, match="token_budget=63 is below max_model_len=64: an encoder computes a text in one"
    ):
        LLM(folder, token_budget=63, max_num_seqs=4)


def test_unknown_modules_and_poolings_are_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(encoder_model("bert")[1], tmp_path / "m")
    add_modules(folder, "max")
    with pytest.raises(UnsupportedModelError, match="pools by max: one of cls, mean, lasttoken is needed"):
        LLM(folder)
    (folder / "modules.json").write_text('[{"type": "sentence_transformers.models.LSTM", "path": ""}]')
    with pytest.raises(UnsupportedModelError, match=r"names a module 'sentence_transformers\.models\.LSTM'"):
        LLM(folder)


# -- one vector in any company ----------------------------------------------------------------------------------------
@cache
def alone(text: tuple[int, ...]) -> bytes:
    (result,) = llm_of("bert").embed([list(text)])
    return result.outputs.data.tobytes()


token_lists = st.lists(st.integers(5, 60), min_size=1, max_size=40)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(texts=st.lists(token_lists, min_size=1, max_size=12), budget=st.integers(64, 200), slots=st.integers(1, 8))
def test_a_vector_has_the_same_bits_in_any_batch(texts: list[list[int]], budget: int, slots: int) -> None:
    with LLM(llm_of("bert").model, token_budget=budget, max_num_seqs=slots, block_size=8) as llm:
        found = vectors(llm, texts)
        llm.engine.blocks.check_invariants()
    assert [each.tobytes() for each in found] == [alone(tuple(text)) for text in texts]


def test_scores_of_vectors_are_their_cosines(llm: LLM) -> None:
    found = [result.outputs.score for result in llm.score(TEXTS[0], list(TEXTS))]
    own = vectors(llm, list(TEXTS))
    assert np.abs(np.array(found) - own @ own[0]).max() < 1e-6
