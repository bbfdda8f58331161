"""Metrics that say what happened, logs without a word of the prompts, and the dashboard's names."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import RunningServer, running_server

from bifolio.serve.views.logs import JsonFormatter, request_id

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana-dashboard.json"


@pytest.fixture(scope="module")
def own() -> Iterator[RunningServer]:
    """A server that nobody else counts on; it guesses tokens."""
    speculative = {"method": "ngram", "adaptive": False}
    with running_server(engine={"speculative": speculative, "num_blocks": 80}) as server:
        yield server


def metrics(server: RunningServer) -> dict[str, float]:
    found = {}
    for line in server.http().get("/metrics").text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            found[name.removeprefix("bifolio:")] = float(value)
    return found


def settled(server: RunningServer) -> dict[str, float]:
    """The counters travel twice a second."""
    import time

    server.wait_idle()
    time.sleep(0.7)
    return metrics(server)


@pytest.mark.full
def test_counters_add_up(own: RunningServer) -> None:
    before = settled(own)
    client = own.client()
    prompt = [9 + number % 40 for number in range(50)]
    for stream in (False, True):
        options: dict[str, Any] = {"max_tokens": 20, "n": 2, "temperature": 0, "extra_body": {"ignore_eos": True}}
        options["logit_bias"] = {"70": 1000}  # a text that is easily guessed
        answer: Any = client.completions.create(model="tiny", prompt=prompt, stream=stream, **options)
        if stream:
            list(answer)
    own.http().post("/v1/completions", json={"prompt": 5})
    after = settled(own)

    def grown(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    assert grown("prompt_tokens_total") == 100
    assert grown("generation_tokens_total") == 80
    assert grown('request_success_total{finished_reason="length"}') == 4
    assert grown("e2e_request_latency_seconds_count") == 2
    assert grown("request_prefill_time_seconds_count") == 2
    assert grown("time_to_first_token_seconds_count") >= 2
    assert grown("inter_token_latency_seconds_count") >= 19 * 2
    assert grown("prefix_cache_queries_total") == 100
    assert grown("prefix_cache_hits_total") == 48
    assert grown("spec_decode_num_draft_tokens_total") >= grown("spec_decode_num_accepted_tokens_total") > 0
    assert grown('http_responses_total{path="/v1/completions",status="200"}') == 2
    assert grown('http_responses_total{path="/v1/completions",status="400"}') == 1
    assert after["num_requests_running"] == after["num_requests_waiting"] == 0
    assert after["kv_cache_usage_perc"] == 0
    assert after["kv_cache_shared_blocks"] == after["kv_cache_block_references"] == 0
    assert after["engine_up"] == 1


@pytest.mark.full
def test_the_dashboard_asks_for_metrics_that_exist(own: RunningServer) -> None:
    own.client().models.list()  # a counter with labels appears when it first counts
    known = {re.sub(r"\{.*", "", name) for name in settled(own)}
    dashboard = json.loads(DASHBOARD.read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    assert len(expressions) >= 12
    for expression in expressions:
        names = re.findall(r"bifolio:([a-z0-9_]+)", expression)
        assert names, expression
        for name in names:
            assert name in known, (name, expression)


def wait_for_log(caplog: pytest.LogCaptureFixture, count: int) -> list[logging.LogRecord]:
    """The lines of `count` requests: a line is written when the answer has gone out, which a client may see before."""
    end = time.monotonic() + 10.0
    while True:
        records = [record for record in caplog.records if record.name == "bifolio.http"]
        if len(records) >= count or time.monotonic() > end:
            return records
        time.sleep(0.01)


@pytest.mark.full
def test_a_log_line_for_each_request_and_no_prompt_in_it(own: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        secret = "xyzzy the secret word"
        body = {"prompt": secret, "max_tokens": 3}
        answer = own.http().post("/v1/completions", json=body, headers={"x-request-id": "my-id-7"})
        own.http().post("/v1/completions", json={"prompt": secret, "temperature": -5})
        own.http().post("/v1/chat/completions", json={"messages": [{"role": "user", "content": secret}], "stop": [""]})
        bad = own.http().post("/v1/completions", json=body, headers={"x-request-id": "bad id"})
        records = wait_for_log(caplog, 4)
    assert answer.headers["x-request-id"] == "my-id-7"
    assert bad.headers["x-request-id"] != "bad id"
    assert len(records) == 4
    assert [record.__dict__["status"] for record in records] == [200, 400, 400, 200]
    assert records[0].__dict__["prompt_tokens"] > 0
    for record in caplog.records:
        text = JsonFormatter("front").format(record)
        json.loads(text)
        assert "xyzzy" not in text


@pytest.mark.full
def test_prompts_are_logged_when_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    with running_server(log_prompts=True) as server, caplog.at_level(logging.INFO):
        server.http().post("/v1/completions", json={"prompt": "xyzzy", "max_tokens": 1})
        records = wait_for_log(caplog, 1)
    assert ["xyzzy"] in [record.__dict__.get("prompt") for record in records]


def test_log_lines_are_json_with_the_request(caplog: pytest.LogCaptureFixture) -> None:
    token = request_id.set("abc")
    try:
        try:
            raise ValueError('a "quoted" \n problem')
        except ValueError:
            record = logging.getLogger("x").makeRecord(
                "x", logging.ERROR, "f", 1, "failed %s", ("here",), __import__("sys").exc_info(), extra={"status": 500}
            )
        entry = json.loads(JsonFormatter("front").format(record))
    finally:
        request_id.reset(token)
    assert entry["request_id"] == "abc"
    assert entry["message"] == "failed here"
    assert entry["status"] == 500
    assert "ValueError" in entry["error"]


@pytest.mark.full
def test_the_live_view_tells_the_state_of_every_block(own: RunningServer) -> None:
    import base64

    with own.http() as http:
        with http.stream("GET", "/live?interval=0.05") as answer:
            line = next(line for line in answer.iter_lines() if line.startswith("data: "))
        event = json.loads(line.removeprefix("data: "))
        assert len(base64.b64decode(event["blocks"])) == 2 * 79
        assert event["ready"] is True
        assert event["slots"] == []
        for wrong in ("0", "x", "nan", "1e9"):
            assert http.get(f"/live?interval={wrong}").status_code == 400
