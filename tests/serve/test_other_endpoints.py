"""Models, embeddings, tokenizing, health and metrics, through OpenAI's client and plain HTTP."""

from __future__ import annotations

import base64
from functools import cache
from typing import Any

import numpy as np
import openai
import pytest
from serving import RunningServer, model_folder

from helpers import tiny_tokenizer

MESSAGES = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return server.client()


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("huge")
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="huge", prompt="x")


@pytest.mark.full
def test_embeddings(client: openai.OpenAI, server: RunningServer) -> None:
    texts = ["The fox liked to read.", "A fox reads books.", "你好"]
    found = client.embeddings.create(model="tiny", input=texts)
    vectors = np.array([item.embedding for item in found.data])
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-5)
    np.testing.assert_allclose(vectors, [mean_hidden(text) for text in texts], atol=1e-4)
    plain = server.http().post("/v1/embeddings", json={"input": texts[0], "encoding_format": "base64"}).json()
    raw = np.frombuffer(base64.b64decode(plain["data"][0]["embedding"]), dtype="<f4")
    np.testing.assert_allclose(raw, vectors[0], atol=1e-6)
    long = [3 + number % 90 for number in range(300)]  # several chunks
    one = client.embeddings.create(model="tiny", input=long).data[0].embedding
    np.testing.assert_allclose(one, mean_hidden(long), atol=1e-4)
    assert found.usage.prompt_tokens == sum(len(tokens_of(text)) for text in texts)
    assert server.wait_idle()["num_used_blocks"] == 0


def tokens_of(text: str | list[int]) -> list[int]:
    return text if isinstance(text, list) else tiny_tokenizer().encode(text).ids


@cache
def transformers_model() -> Any:
    import torch
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(model_folder(), dtype=torch.float32)


def mean_hidden(text: str | list[int]) -> np.ndarray:
    """By transformers: the last hidden states (after the final norm), averaged, of length 1."""
    import torch

    model = transformers_model()
    with torch.no_grad():
        states = model.model(torch.tensor([tokens_of(text)])).last_hidden_state[0]
    mean = states.double().mean(dim=0)
    return np.asarray((mean / mean.norm()).numpy())


def test_tokenize_and_back(server: RunningServer) -> None:
    with server.http() as http:
        text = "Grüße, 你好 🙂"
        found = http.post("/tokenize", json={"prompt": text}).json()
        assert found["count"] == len(found["tokens"]) == len(found["token_texts"])
        assert http.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": text}
        chat = http.post("/tokenize", json={"messages": MESSAGES}).json()
        back = http.post("/detokenize", json={"tokens": chat["tokens"]}).json()
        assert back["prompt"] == "system: Be kind.\nuser: Hello\nassistant:"
        assert http.post("/tokenize", json={}).status_code == 400
        assert http.post("/detokenize", json={"tokens": [10**6]}).status_code == 400


def test_health_ready_metrics(server: RunningServer, client: openai.OpenAI) -> None:
    client.completions.create(model="tiny", prompt="Once upon a time", max_tokens=12)
    with server.http() as http:
        assert http.get("/health").json() == {"status": "ok"}
        assert http.get("/ready").json() == {"status": "ready"}
        text = http.get("/metrics").text
    for name in (
        "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries_total",
        "prefix_cache_hits_total", "time_to_first_token_seconds_bucket", "inter_token_latency_seconds_sum",
        "e2e_request_latency_seconds_count", "request_prefill_time_seconds_sum", "request_decode_time_seconds_sum",
        "num_preemptions_total", "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total",
    ):  # fmt: skip
        assert f"bifolio:{name}" in text, name
