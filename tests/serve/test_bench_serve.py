"""The load generator: against our own server, and against one that tells it known times."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving import RunningServer

from bifolio.cli.main import build_app
from bifolio.errors import ConfigError
from bifolio.measure.load import Lengths, LoadReport, LoadRequest, Plan, arrivals, parse_limits
from bifolio.measure.load_client import LoadClient, Timing
from bifolio.measure.load_processes import shares
from cli_runner import CliRunner


def run(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(build_app(), ["bench", "serve", *arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    report: dict[str, Any] = json.loads(result.stdout)
    return report


@pytest.mark.full
def test_closed_loop(server: RunningServer, tmp_path: Path) -> None:
    picture = tmp_path / "load.png"
    report = run(
        "--url", server.url, "-c", "4", "-n", "12", "--prompt", "8:16", "--output", "6", "--plot", str(picture)
    )
    assert report["failed"] == 0, report["errors"]
    assert report["requests"] == 12
    assert report["output_tokens"] == 72
    assert 8 * 12 <= report["prompt_tokens"] <= 16 * 12
    assert 0 < report["ttft"]["p50"] <= report["e2e"]["p50"]
    assert report["goodput_share"] == 1.0
    assert picture.stat().st_size > 10_000


@pytest.mark.full
def test_open_loop_with_limits_nobody_can_keep(server: RunningServer) -> None:
    report = run("--url", server.url + "/v1", "--rate", "50", "-n", "10", "--output", "4", "--limits", "ttft:0.001")
    assert report["failed"] == 0
    assert report["goodput_share"] == 0.0
    assert report["seconds"] > 0.05


@pytest.mark.full
def test_a_trace(server: RunningServer, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = [f"2023-11-16 18:17:0{second}.0000000,{20 + second},{5 + second}" for second in range(5)]
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows) + "\n")
    report = run("--url", server.url, "--trace", str(trace), "--speed", "50", "--max-model-len", "256")
    assert report["requests"] == 5
    assert report["output_tokens"] == sum(5 + second for second in range(5))
    assert report["prompt_tokens"] == sum(20 + second for second in range(5))


@pytest.mark.full
def test_the_table_for_people(server: RunningServer) -> None:
    arguments = ["bench", "serve", "--url", server.url, "-n", "4", "--output", "3", "--limits", "e2e:60000"]
    result = CliRunner().invoke(build_app(), arguments, catch_exceptions=False)
    assert "first token" in result.stdout
    assert "goodput" in result.stdout


@pytest.mark.full
def test_failures_are_counted(server: RunningServer) -> None:
    report = run("--url", server.url, "-n", "3", "--prompt", "5000")
    assert report["failed"] == 3
    assert "400" in report["errors"][0]


def test_times_are_what_the_server_did() -> None:
    """Three events, 50 ms apart, behind a wait of 100 ms: known to the client within scheduling noise."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        await asyncio.sleep(0.1)
        for number in range(3):
            event = b'data: {"choices": [{"text": "x", "finish_reason": null}]}\n\n'
            writer.write(f"{len(event):x}\r\n".encode() + event + b"\r\n")
            await writer.drain()
            await asyncio.sleep(0.05 if number < 2 else 0)
        tail = b'data: {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}\n\ndata: [DONE]\n\n'
        writer.write(f"{len(tail):x}\r\n".encode() + tail + b"\r\n0\r\n\r\n")
        writer.close()

    async def measure() -> Timing:
        listener = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        return await LoadClient(f"127.0.0.1:{port}").complete({"prompt": "x"})

    timing = asyncio.run(measure())
    assert timing.error is None
    assert (timing.num_prompt, timing.num_output, len(timing.events)) == (7, 3, 3)
    assert timing.first_token >= 0.095
    assert timing.whole >= timing.first_token + 0.095
    assert timing.per_token == pytest.approx((timing.whole - timing.first_token) / 2)
    report = LoadReport("x", [timing, Timing(error="no")], 1.0, {"ttft": 5.0})
    assert report.as_dict()["goodput_share"] == 0.5


def test_lengths_and_arrivals() -> None:
    generator = np.random.default_rng(0)
    assert Lengths("7").draw(3, generator) == [7, 7, 7]
    assert set(Lengths("2:4").draw(200, generator)) == {2, 3, 4}
    assert np.median(Lengths("100~0.5").draw(4000, generator)) == pytest.approx(100, rel=0.1)
    moments = arrivals(4000, 8.0, generator)
    assert moments[0] == 0.0
    assert np.diff(moments).mean() == pytest.approx(1 / 8, rel=0.1)
    assert np.diff(moments).std() == pytest.approx(1 / 8, rel=0.1)  # a Poisson process
    assert np.diff(arrivals(4000, 8.0, generator, 0.25)).std() > 1.5 / 8  # in bursts
    assert arrivals(3, float("inf"), generator) == [0.0] * 3
    for wrong in ("", "0", "4:2", "x", "-3", "5~", "0~1"):
        with pytest.raises(ConfigError):
            Lengths(wrong).draw(1, generator)
    assert parse_limits("ttft:500,tpot:50") == {"ttft": 0.5, "tpot": 0.05}
    for wrong in ("ttft", "ttft:x", "speed:5", "ttft:-1"):
        with pytest.raises(ConfigError):
            parse_limits(wrong)


def test_an_address_where_nobody_is() -> None:
    with pytest.raises(ConfigError):
        asyncio.run(LoadClient("http://127.0.0.1:9/v1").model_name())
    with pytest.raises(ConfigError):
        LoadClient("ftp://x")


@pytest.mark.full
def test_several_client_processes_send_every_request_once(server: RunningServer) -> None:
    report = run("--url", server.url, "-c", "5", "-n", "11", "--output", "3:9", "--clients", "2", "--seed", "3")
    alone = run("--url", server.url, "-c", "5", "-n", "11", "--output", "3:9", "--seed", "3")
    for name in ("requests", "failed", "output_tokens", "prompt_tokens"):
        assert report[name] == alone[name]
    assert report["failed"] == 0
    assert 0 < report["ttft"]["p50"] <= report["e2e"]["max"] <= report["seconds"]
    assert report["front_end_cpu_us_per_token"] > 0
    assert report["engine_cpu_us_per_token"] > 0


@pytest.mark.parametrize(("concurrency", "clients"), [(5, 2), (2, 4), (None, 3)])
def test_requests_and_concurrency_are_divided(concurrency: int | None, clients: int) -> None:
    requests = [LoadRequest(float(number), [number], 1) for number in range(10)]
    parts = shares(Plan(requests, concurrency), clients)
    assert sorted(index for own, _ in parts for index in own) == list(range(10))
    assert all(part.requests == [requests[index] for index in own] for own, part in parts)
    if concurrency is None:
        assert all(part.concurrency is None for _, part in parts)
    else:
        assert sum(part.concurrency or 0 for _, part in parts) == concurrency
