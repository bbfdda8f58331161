"""A server on a tensor-parallel engine: a killed rank ends requests with a retryable error, and the engine returns."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from serving import running_server

from helpers import cpu_kernel_names

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif("native" not in cpu_kernel_names(), reason="the ranks need the compiled extension"),
]
REQUEST = {"prompt": "the fox", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.skipif(not Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").exists(), reason="needs Linux")
def test_a_killed_rank_is_replaced() -> None:
    engine = {"kernels": "native", "threads": 2, "tensor_parallel_size": 2}
    with running_server(engine=engine) as server, server.http() as http:
        first = http.post("/v1/completions", json=REQUEST).json()["choices"]
        hello = server.context.engine.hello
        assert hello is not None
        (rank,) = children(hello.pid)
        os.kill(rank, signal.SIGKILL)
        lost = http.post("/v1/completions", json=REQUEST)
        assert lost.status_code == 503
        assert lost.json()["error"]["code"] == "engine_unavailable"
        end = time.monotonic() + 60
        while (answer := http.post("/v1/completions", json=REQUEST)).status_code != 200:
            assert time.monotonic() < end, answer.text
            time.sleep(0.2)
        assert answer.json()["choices"] == first
        assert not Path(f"/proc/{hello.pid}").exists()
