"""Adapters (LoRA) of models that make vectors and scores: the results of PEFT, alone and in one batch with the base."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from encoder_models import TEXTS, encoder_model, oracle_states
from serving import running_server
from test_decoders import decoder
from test_encoder_verbs import run

from adapter_files import peft_adapter
from bifolio import LLM, PoolingParams
from bifolio.errors import RequestError
from helpers import fresh_folder, tiny_tokenizer

TARGETS = {
    "bert": ["query", "value"], "xlm-roberta": ["query", "value"], "mpnet": ["q", "v", "o"],
    "modernbert": ["Wqkv", "Wo", "Wi"], "nomicbert": ["q_proj", "v_proj", "down_proj"],
    "qwen3": ["q_proj", "v_proj", "down_proj"],
}  # fmt: skip
STATES = PoolingParams(normalize=False)
TEXT = ["Once upon a time", "The fox", "There was a little dog who ran"]


@cache
def adapted(name: str, seed: int = 0) -> tuple[Any, Path, Path]:
    """A model with an adapter, the folder of its base and that of the adapter."""
    model, folder = decoder("Qwen3Model", tied=True) if name == "qwen3" else encoder_model(name)
    changed, adapter = peft_adapter(model, seed, target_modules=TARGETS[name])
    return changed, folder, adapter


def states(llm: LLM, adapter: Any) -> list[np.ndarray]:
    return [result.outputs.data for result in llm.encode(list(TEXTS), STATES, lora_request=adapter)]


@pytest.mark.parametrize("kernels", ["native", "reference"])
@pytest.mark.parametrize("name", TARGETS)
def test_token_vectors_are_those_of_peft(name: str, kernels: str) -> None:
    model, folder, adapter = adapted(name)
    with LLM(folder, lora_modules={"a": adapter}, kernels=kernels) as llm:
        plain, ours = states(llm, None), states(llm, "a")
        tokenizer = llm.model.require_tokenizer()
        for text, one, base in zip(TEXTS, ours, plain, strict=True):
            assert np.abs(one - oracle_states(model, tokenizer.encode(text))).max() < 2e-5, text
            assert np.abs(one - base).max() > 0.01
        mixed = states(llm, ["a" if number % 2 else None for number in range(len(TEXTS))])
        for number, one in enumerate(mixed):
            assert np.array_equal(one, (ours if number % 2 else plain)[number])


def test_scores_of_pairs_have_one_adapter() -> None:
    _, folder, adapter = adapted("bert")
    with LLM(folder, lora_modules={"a": adapter}) as llm:
        vectors = np.stack([result.outputs.data for result in llm.embed(list(TEXTS), lora_request="a")])
        scores = [result.outputs.score for result in llm.score(TEXTS[0], list(TEXTS), lora_request="a")]
        assert np.abs(np.array(scores) - vectors @ vectors[0]).max() < 1e-6
        with pytest.raises(RequestError, match="one lora_request"):
            llm.score(TEXTS[0], list(TEXTS), lora_request=["a"] * len(TEXTS))
        with pytest.raises(RequestError, match=f"{len(TEXTS)} prompts and 1 lora_request"):
            llm.embed(list(TEXTS), lora_request=["a"])


def test_the_server_and_the_command_line_take_adapters(tmp_path: Path) -> None:
    """By name as the model; unknown names are refused."""
    _, folder, adapter = adapted("bert")
    texts = list(TEXTS)
    with LLM(folder, lora_modules={"a": adapter}) as llm:
        expected = [np.stack([r.outputs.data for r in llm.embed(texts, lora_request=name)]) for name in (None, "a")]
        scores = [[r.outputs.score for r in llm.score(texts[0], texts, lora_request=name)] for name in (None, "a")]
    engine = {
        "max_model_len": 64,
        "num_blocks": 64,
        "kernels": "native",
        "lora_modules": {"a": str(adapter)},
        "model": str(folder),
    }
    with running_server(engine=engine, model_name="m") as server:
        http = server.http()
        for name, own, scored in zip(("m", "a"), expected, scores, strict=True):
            found = http.post("/v1/embeddings", json={"model": name, "input": texts}).json()
            assert found["model"] == name
            assert np.array_equal([item["embedding"] for item in found["data"]], own)
            found = http.post("/api/embed", json={"model": name, "input": texts}).json()
            assert np.array_equal(found["embeddings"], own)
            found = http.post("/score", json={"model": name, "text_1": texts[0], "text_2": texts}).json()
            assert np.abs(np.array([item["score"] for item in found["data"]]) - scored).max() < 1e-6
        assert http.post("/v1/embeddings", json={"model": "b", "input": texts}).status_code == 404
        assert np.array_equal(http.post("/embed", json={"inputs": texts}).json(), expected[0])
    (tmp_path / "texts.txt").write_text("\n".join(text for text in texts if text and "\n" not in text))
    for lora, own in ((("--lora", str(adapter)), expected[1]), ((), expected[0])):
        run("embed", str(tmp_path / "texts.txt"), "-m", str(folder), "-o", str(tmp_path / "v.npy"), *lora)
        kept = [number for number, text in enumerate(texts) if text and "\n" not in text]
        assert np.array_equal(np.load(tmp_path / "v.npy"), own[kept])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["bert", "roberta", "modernbert"])
def test_a_saved_classifier_scores_its_own_texts(name: str) -> None:
    """PEFT saves the modules `classifier` and `score` for this task, whichever the model has."""
    model, folder = encoder_model(name, "SequenceClassification", num_labels=3)
    changed, adapter = peft_adapter(model, 1, target_modules=TARGETS.get(name, ["query"]), task_type="SEQ_CLS")
    with LLM(folder, lora_modules={"a": adapter}) as llm:
        tokenizer, texts = llm.model.require_tokenizer(), list(TEXTS)
        plain, ours = scores(llm, texts, None), scores(llm, texts, "a")
        for text, one in zip(texts, ours, strict=True):
            assert np.abs(one - oracle_scores(changed, tokenizer.encode(text))).max() < 1e-5, text
        mixed = scores(llm, texts, ["a" if number % 2 else None for number in range(len(texts))])
        for number, one in enumerate(mixed):
            assert np.array_equal(one, (ours if number % 2 else plain)[number])
        assert np.abs(plain - ours).max() > 0.01


@pytest.mark.filterwarnings("ignore")
def test_a_saved_score_and_embedding_of_a_decoder() -> None:
    model, folder = decoder_classifier()
    saved = {"modules_to_save": ["score", "embed_tokens"], "target_modules": ["q_proj"], "task_type": "SEQ_CLS"}
    changed, adapter = peft_adapter(model, 1, **saved)
    with LLM(folder, lora_modules={"a": adapter}) as llm:
        tokenizer = llm.model.require_tokenizer()
        found = [scores(llm, TEXT, name) for name in (None, "a")]
    for values, own in zip(found, (model, changed), strict=True):
        for text, one in zip(TEXT, values, strict=True):
            assert np.abs(one - oracle_scores(own, tokenizer.encode(text))).max() < 1e-5
    assert np.abs(found[0] - found[1]).max() > 0.01


def scores(llm: LLM, texts: list[str], lora: Any) -> np.ndarray:
    return np.stack([each.outputs.data for each in llm.classify(texts, lora_request=lora)])


def oracle_scores(model: Any, tokens: list[int]) -> np.ndarray:
    import torch

    with torch.no_grad():
        ids = torch.tensor([tokens])
        return np.asarray(model(ids, attention_mask=torch.ones_like(ids)).logits[0].softmax(-1))


def decoder_classifier() -> tuple[Any, Path]:
    import torch
    import transformers

    torch.manual_seed(1)
    config = transformers.Qwen3Config(
        vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=128, num_labels=3, pad_token_id=0,
        initializer_range=0.2, tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.Qwen3ForSequenceClassification(config).eval()
    folder = fresh_folder("qwen3")
    model.save_pretrained(folder)
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    return model, folder
