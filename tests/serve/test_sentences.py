"""Sentences of refusals: the field or path, the fault of this input, and the remedy."""

from __future__ import annotations

import asyncio
import json
import struct
from pathlib import Path
from typing import Any

import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request

from bifolio.config import checked_kv_dtype
from bifolio.errors import ConfigError, ModelFileError, RequestError
from bifolio.model.loader import load_model
from bifolio.sampling_params import SamplingParams
from bifolio.serve.http.app import _http_error
from bifolio.serve.http.errors import queue_full


def refused(method: str, path: str, status: int = 404, **headers: str) -> Any:
    scope = {"type": "http", "method": method, "path": path, "query_string": b"", "headers": [(b"host", b"here")]}
    answer = asyncio.run(_http_error(Request(scope), HTTPException(status, headers=headers)))
    assert answer.status_code == status
    return json.loads(bytes(answer.body))


@pytest.mark.parametrize(
    ("method", "path"), [("DELETE", "/api/delete"), ("POST", "/api/create"), ("POST", "/api/copy")]
)
def test_unknown_paths_of_ollama_are_refused_in_its_shape(method: str, path: str) -> None:
    assert refused(method, path) == {"error": f"this server has no {path}: GET /docs lists its paths"}


def test_unknown_paths_and_methods_are_named() -> None:
    assert refused("GET", "/nothing")["error"]["message"] == "this server has no /nothing: GET /docs lists its paths"
    assert len(refused("GET", "/" + "x" * 5000)["error"]["message"]) < 300
    assert refused("GET", "/v1/messages/none")["type"] == "error"
    answer = refused("GET", "/v1/completions", 405, Allow="POST")
    assert answer["error"]["message"] == "/v1/completions takes POST, not GET"


def test_a_full_server_says_when_to_come_again() -> None:
    error = queue_full(272, 3)
    assert str(error) == "the server is full: 272 requests run or wait: send this one again in 3 s"
    assert (error.status, error.code, error.headers()["retry-after"]) == (429, "queue_full", "3")


def test_options_of_sampling_and_the_cache_are_named() -> None:
    with pytest.raises(RequestError, match=r"^temperature is -1: pass a number of at least 0$"):
        SamplingParams(temperature=-1)
    with pytest.raises(RequestError, match=r"^top_p is 2: pass a number above 0 and at most 1$"):
        SamplingParams(top_p=2)
    with pytest.raises(
        ConfigError, match=r"^kv_cache_dtype \(--kv-dtype\) is 'f8': pass auto, f32, f16, bf16, fp8 or q8_0$"
    ):
        checked_kv_dtype("f8")


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ((27, 0, 5, 1, 1, 9, 9), "its header has MLP width = 0: pass"),
        ((27, 8, 5, 2, 1, 9, 9), "its header has a width of 27 for heads = 2: pass"),
    ],
)
def test_a_file_that_is_no_llama2c_model_says_why(sizes: tuple[int, ...], said: str, tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(struct.pack("<7i", *sizes) + bytes(64))
    with pytest.raises(ModelFileError, match=r"is no llama2\.c model") as refusal:
        load_model(tmp_path / "model.bin")
    assert said in str(refusal.value)
