"""A server whose model has damaged weights: named errors, no NaN vectors, no empty texts, and it goes on serving."""

from __future__ import annotations

from typing import Any

import pytest
from serving import running_server

from bifolio.errors import NO_FINITE_LOGIT, NO_FINITE_STATE
from helpers import nan_folder


@pytest.mark.full
def test_every_endpoint_names_the_error() -> None:
    text: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 4}
    with (
        running_server(engine={"model": str(nan_folder(max_position_embeddings=512))}) as server,
        server.http() as http,
    ):
        for body in (text, {**text, "beam_search": {"width": 2}}, {**text, "n": 2, "echo": True, "logprobs": 1}):
            answer = http.post("/v1/completions", json=body)
            assert (answer.status_code, answer.json()["error"]["message"]) == (500, NO_FINITE_LOGIT)
        answer = http.post("/v1/embeddings", json={"input": "Once upon a time"})
        assert (answer.status_code, answer.json()["error"]["message"]) == (500, NO_FINITE_STATE)
        server.wait_idle()
        assert http.get("/health").status_code == 200
