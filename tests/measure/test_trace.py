"""Traces: reading both formats, prompts that share what the recorded ones shared, replay and static batching."""

from __future__ import annotations

from pathlib import Path

import pytest

from bifolio import LLM
from bifolio.engine.engine import InferenceEngine
from bifolio.errors import ConfigError
from bifolio.kernels.reference import ReferenceKernels
from bifolio.measure.random_models import random_model
from bifolio.measure.static_batch import run_static, static_model_len
from bifolio.measure.trace import Moment, TraceReport, replay
from bifolio.measure.trace_files import TraceRequest, make_prompts, read_trace, scaled

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2220670,879,55
"""
MOONCAKE = """{"timestamp": 1000, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 9]}
{"timestamp": 3500, "input_length": 1500, "output_length": 4, "hash_ids": [7, 8, 11]}

"""
REQUESTS = [TraceRequest(0.0, 20, 30), TraceRequest(0.0, 5, 2), TraceRequest(0.0, 9, 3), TraceRequest(0.0, 12, 4)]


def make_engine(**options: object) -> InferenceEngine:
    settings = {"block_size": 4, "num_blocks": 200, "max_model_len": 64, "max_num_seqs": 2, **options}
    return LLM(random_model("tiny"), kernels=ReferenceKernels(), **settings).engine  # type: ignore[arg-type]


def write(tmp_path: Path, name: str, text: str) -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_azure_times_are_counted_from_the_first_request(tmp_path: Path) -> None:
    requests = read_trace(write(tmp_path, "conv.csv", AZURE))
    assert [(r.num_prompt, r.num_output) for r in requests] == [(374, 44), (396, 109), (879, 55)]
    assert [r.arrival for r in requests] == pytest.approx([0.0, 4.314579, 4.541477], abs=1e-5)
    assert len(read_trace(write(tmp_path, "conv.csv", AZURE), limit=2)) == 2


def test_mooncake_hash_ids_become_shared_prefixes(tmp_path: Path) -> None:
    requests = read_trace(write(tmp_path, "trace.jsonl", MOONCAKE))
    assert [r.arrival for r in requests] == [0.0, 2.5]
    first, second = make_prompts(requests, 512)
    assert (len(first), len(second)) == (1100, 1500)
    assert first[:1024] == second[:1024]  # 7 and 8
    assert first[1024:1100] != second[1024:1100]  # 9 and 11


def test_scaling_keeps_what_is_shared_and_cuts_what_does_not_fit(tmp_path: Path) -> None:
    requests, num_cut = scaled(read_trace(write(tmp_path, "trace.jsonl", MOONCAKE)), 1 / 32, 40)
    assert num_cut == 1  # 47 + 1 tokens do not fit into 40
    assert [(r.num_prompt, r.num_output, r.tokens_per_hash) for r in requests] == [(34, 1, 16), (39, 1, 16)]
    first, second = make_prompts(requests, 512)
    assert first[:32] == second[:32]
    assert first[32:] != second[32 : len(first)]


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("a.csv", "x,y\n1,2\n", "neither an Azure"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,-3,4\n", "not a number of tokens"),
        ("a.jsonl", "[1, 2]\n", "nor a Mooncake"),
        ("a.jsonl", "\n", "no requests"),
    ],
)
def test_files_that_are_no_trace_are_refused(tmp_path: Path, name: str, text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        read_trace(write(tmp_path, name, text))
    with pytest.raises(ConfigError, match="does not exist"):
        read_trace(tmp_path / "absent.csv")


def test_replay_counts_every_token_and_measures_from_arrival() -> None:
    report = replay(make_engine(), REQUESTS, make_prompts(REQUESTS, 512), speed=0)
    assert (report.num_requests, report.num_prompt_tokens, report.num_output_tokens) == (4, 46, 39)
    assert report.first_token.count == 4
    assert report.between_tokens.count == 39 - 4
    assert report.latency.max <= report.seconds
    assert report.peak_running == 2
    assert report.num_preemptions == 0
    assert report.num_computed_prompt_tokens == 46
    assert 0.5 < report.utilisation <= 1.0


def test_replay_waits_for_arrivals_and_counts_from_them() -> None:
    requests = [TraceRequest(2.0, 4, 3)]
    report = replay(make_engine(), requests, make_prompts(requests, 512), speed=10)
    assert report.seconds >= 0.2
    assert report.latency.max == pytest.approx(report.seconds - 0.2)


def test_replay_shares_prefixes_that_the_trace_shares() -> None:
    requests = [TraceRequest(0.0, 12, 2, (1, 2), 8), TraceRequest(0.0, 12, 2, (1, 3), 8)]
    report = replay(make_engine(max_num_seqs=1), requests, make_prompts(requests, 512), speed=0)
    assert report.num_cached_tokens == 8
    assert report.num_computed_prompt_tokens == 24 - 8


@pytest.mark.full
def test_replay_counts_preemptions_of_a_small_pool() -> None:
    requests = [TraceRequest(0.0, 8, 40) for _ in range(4)]
    engine = make_engine(num_blocks=24, max_num_seqs=4)
    report = replay(engine, requests, make_prompts(requests, 512), speed=0)
    assert report.num_preemptions > 0
    assert report.num_output_tokens == 160


@pytest.mark.parametrize("padded", [True, False])
def test_static_batches_wait_for_the_longest(padded: bool) -> None:
    engine = make_engine(max_model_len=static_model_len(REQUESTS), enable_prefix_caching=False)
    report = run_static(engine, REQUESTS, make_prompts(REQUESTS, 512), batch_size=2, padded=padded, speed=0)
    assert report.num_output_tokens == 39  # padding is not counted
    assert report.num_computed_prompt_tokens == (2 * 20 + 2 * 12 if padded else 46)
    produced = report.moments[-1].num_output_tokens
    assert produced == (2 * 30 + 2 * 4 if padded else 39)
    # The second batch starts when the longest of the first has ended: 30 steps, then at least 4.
    assert len(report.moments) >= 34


def test_utilisation_is_weighted_by_time_and_blocks() -> None:
    moments = [Moment(1.0, 1.0, 3, 0, 10, 0.5, 0), Moment(4.0, 3.0, 1, 0, 30, 1.0, 0)]
    report = TraceReport("x", 1, 1, 1, 4.0, 4.0, 100, 16, moments=moments)
    assert report.utilisation == pytest.approx((1 * 10 * 0.5 + 3 * 30) / (10 + 90))
    assert report.occupancy == pytest.approx((10 + 90) / 4 / 100)
    assert report.mean_running == pytest.approx((3 + 3) / 4)


def test_real_traces_are_read(data_dir: Path) -> None:
    azure = read_trace(data_dir / "traces" / "azure_conv.csv", 200)
    assert (len(azure), azure[0].num_prompt, azure[-1].num_output) == (200, 374, 409)
    mooncake = read_trace(data_dir / "traces" / "mooncake_conversation.jsonl", 50)
    assert mooncake[0].hash_ids == tuple(range(14))


@pytest.mark.full
def test_azure_trace_fills_blocks_and_runs_many_at_once(data_dir: Path) -> None:
    """A pool so small that requests are preempted, and still nearly every slot of an allocated block is filled."""
    requests, _ = scaled(read_trace(data_dir / "traces" / "azure_conv.csv", 60), 0.125, 400)
    engine = LLM(
        random_model("tiny"), num_blocks=260, block_size=4, max_num_seqs=32, max_model_len=400, threads=1
    ).engine
    report = replay(engine, requests, make_prompts(requests, 512), speed=0)
    assert report.utilisation > 0.96
    assert report.peak_running >= 16
    assert report.num_preemptions > 0
    assert report.num_output_tokens == sum(request.num_output for request in requests)
