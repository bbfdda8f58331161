"""Encoders behind the server: every call for vectors and scores gives those of `LLM`."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest
from encoder_models import TEXTS, encoder_model
from serving import RunningServer, running_server

from bifolio import LLM, PoolingParams

ENGINE = {"max_model_len": 64, "num_blocks": 64, "max_num_seqs": 16, "chunk_size": 256, "kernels": "native"}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    folder = encoder_model("bert")[1]
    with running_server(engine={**ENGINE, "model": str(folder)}, model_name="encoder") as found:
        yield found


@pytest.fixture(scope="module")
def expected() -> np.ndarray:
    with LLM(encoder_model("bert")[1]) as llm:
        return np.stack([result.outputs.data for result in llm.embed(list(TEXTS))])


def post(server: RunningServer, path: str, **body: Any) -> Any:
    answer = server.http().post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_vectors_of_every_protocol(server: RunningServer, expected: np.ndarray) -> None:
    texts = list(TEXTS)
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    found = client.embeddings.create(model="encoder", input=texts)  # asks for base64
    assert np.array_equal(np.array([item.embedding for item in found.data], np.float32), expected)
    plain = post(server, "/v1/embeddings", input=texts, encoding_format="base64")["data"]
    assert b"".join(base64.b64decode(item["embedding"]) for item in plain) == expected.tobytes()
    cut = np.array(client.embeddings.create(model="encoder", input=texts[1], dimensions=12).data[0].embedding)
    assert np.abs(cut - expected[1, :12] / np.linalg.norm(expected[1, :12])).max() < 1e-6
    ids = post(server, "/tokenize", prompt=texts[1])["tokens"]
    assert np.array_equal(post(server, "/v1/embeddings", input=[ids])["data"][0]["embedding"], expected[1])
    assert np.array_equal(post(server, "/embed", inputs=texts), expected)
    assert np.array_equal(post(server, "/api/embed", model="encoder", input=texts)["embeddings"], expected)
    assert np.array_equal(post(server, "/api/embeddings", model="encoder", prompt=texts[0])["embedding"], expected[0])
    tokens = post(server, "/pooling", input=texts[1])["data"][0]["data"]
    assert np.array(tokens).shape == (len(ids), 48)


def test_texts_are_ranked_by_their_cosines(server: RunningServer, expected: np.ndarray) -> None:
    cosines = expected.astype(np.float64) @ expected[0].astype(np.float64)
    order = np.argsort(-cosines).tolist()
    found = post(server, "/v1/rerank", query=TEXTS[0], documents=list(TEXTS), return_documents=True, top_n=3)["results"]
    assert [item["index"] for item in found] == order[:3]
    assert [item["document"]["text"] for item in found] == [TEXTS[index] for index in order[:3]]
    assert np.abs(np.array([item["relevance_score"] for item in found]) - cosines[order[:3]]).max() < 1e-6
    tei = post(server, "/rerank", query=TEXTS[0], texts=list(TEXTS))
    assert [item["index"] for item in tei] == order
    scored = post(server, "/score", text_1=TEXTS[0], text_2=list(TEXTS))["data"]
    assert np.abs(np.array([item["score"] for item in scored]) - cosines).max() < 1e-6


def test_refusals(server: RunningServer) -> None:
    http = server.http()
    for path, body, said in (
        ("/v1/completions", {"prompt": "the fox"}, "generates no text"),
        ("/v1/embeddings", {"input": "fox " * 90}, "92 tokens and 64 fit"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": "x", "dimensions": 100}, "the vectors of this model have 48"),
        ("/v1/embeddings", {"input": "x", "prompt_name": "query"}, "no prompt 'query'"),
        ("/classify", {"input": "x"}, "no classifier"),
        ("/rerank", {"query": "x"}, "needs documents, or texts"),
    ):
        answer = http.post(path, json=body)
        assert answer.status_code == 400, (path, answer.text)
        assert said in answer.text
    assert len(post(server, "/v1/embeddings", input="fox " * 90, truncate_prompt_tokens=-1)["data"]) == 1


def test_hostile_inputs_are_bounded(server: RunningServer) -> None:
    """Many texts, long ones and empty ones: refused with a reason, or answered, and the server lives on."""
    http, most = server.http(), server.context.limits.max_prompts
    for path, body, said in (
        ("/v1/embeddings", {"input": [""] * (most + 1)}, f"{most + 1} texts are too many"),
        ("/rerank", {"query": "fox", "documents": ["x"] * (most + 1)}, "texts are too many"),
        ("/score", {"text_1": "fox", "text_2": ["x"] * (most + 1)}, "texts are too many"),
        ("/predict", {"inputs": [["fox"]] * (most + 1)}, "no classifier"),
        ("/v1/embeddings", {"input": "fox " * 10**6}, "64"),
        ("/rerank", {"query": "fox " * 10**5, "documents": ["x"]}, "64"),
        ("/v1/embeddings", {"input": [7] * 10**5}, "64 fit"),
        ("/v1/embeddings", {"input": [[7], []]}, "input is empty"),
        ("/v1/embeddings", {"input": "x", "dimensions": 0}, "dimensions"),
        ("/v1/embeddings", {"input": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ("/v1/embeddings", {"input": "x", "truncate_prompt_tokens": -7}, "truncate_prompt_tokens"),
    ):
        answer = http.post(path, json=body, timeout=60)
        assert 400 <= answer.status_code < 500, (path, answer.text[:200])
        assert said in answer.text, (said, answer.text[:200])
    empty = post(server, "/v1/embeddings", input=["", "fox", ""])["data"]
    assert np.isfinite(empty[0]["embedding"]).all()
    assert empty[0]["embedding"] == empty[2]["embedding"]
    many = post(server, "/v1/embeddings", input=["fox"] * most)["data"]
    assert all(each["embedding"] == empty[1]["embedding"] for each in many)


def test_a_reranker_and_a_classifier() -> None:
    pairs = [[TEXTS[0], text] for text in TEXTS]
    folder = encoder_model("bert", "SequenceClassification", num_labels=1)[1]
    with LLM(folder) as llm:
        scores = [result.outputs.score for result in llm.score(TEXTS[0], list(TEXTS))]
        raw = llm.score(TEXTS[0], TEXTS[1], pooling_params=PoolingParams(use_activation=False))[0].outputs.score
    with running_server(engine={**ENGINE, "model": str(folder)}) as server:
        found = post(server, "/v1/score", text_1=TEXTS[0], text_2=list(TEXTS))["data"]
        assert [item["score"] for item in found] == scores
        predicted = post(server, "/predict", inputs=pairs)
        assert [each[0]["score"] for each in predicted] == scores
        ranked = post(server, "/rerank", query=TEXTS[0], texts=[TEXTS[1]], raw_scores=True)
        assert ranked[0]["score"] == raw
        labels = post(server, "/classify", input=TEXTS[1])["data"][0]
        assert (labels["label"], labels["num_classes"]) == ("LABEL_0", 1)
