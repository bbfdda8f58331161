"""Simulated fleets: the same schedule as a real engine, right sums of times, and routing that finds prefixes."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("msgspec")

from benchmarks.__main__ import build_app
from benchmarks.fleet.replica import ReplicaSizes, SimulatedReplica
from benchmarks.fleet.simulation import ONE_CACHE, Fleet, FleetReport, FleetSettings
from benchmarks.fleet.step_times import Observed, StepTimes, Work, measure_steps, work_of
from bifolio import LLM
from bifolio.cluster.prefix_router import POLICIES
from bifolio.errors import ConfigError
from bifolio.measure.trace import exactly
from bifolio.measure.trace_files import TraceRequest, read_trace
from cli_runner import CliRunner
from helpers import tiny_folder

TIMES = StepTimes(1e-3, 1e-5, 1e-9, 1e-5, 1e-8)


def test_a_fit_finds_the_coefficients() -> None:
    chance = np.random.default_rng(0)
    works = [Work(*(float(value) for value in chance.integers(0, 1000, 4))) for _ in range(50)]
    found = StepTimes.fit([(work, TIMES.seconds(work)) for work in works])
    assert found.as_dict() == pytest.approx(TIMES.as_dict(), rel=1e-6)
    noisy = StepTimes.fit([(work, 2e-3) for work in works])  # nothing but the base matters
    assert noisy.base == pytest.approx(2e-3, rel=1e-6)
    assert min(noisy.as_dict().values()) >= 0.0


def test_a_replica_schedules_as_the_engine_does() -> None:
    """The same requests on a real engine and on a simulated one, at grain 1: equal steps, hits and outputs."""
    options: dict[str, Any] = {"block_size": 8, "max_num_seqs": 4, "chunk_size": 16, "num_blocks": 33}
    llm = LLM(tiny_folder(), kernels="reference", max_model_len=128, **options)
    chance = random.Random(3)
    common = [chance.randrange(3, 60) for _ in range(20)]
    prompts = [[*common, *(chance.randrange(3, 60) for _ in range(chance.randrange(1, 60)))] for _ in range(12)]
    for number, prompt in enumerate(prompts):
        llm.engine.add_request(str(number), prompt, exactly(5 + number))
    with Observed(llm.engine) as observed:
        while llm.engine.has_work:
            observed.step()
    sizes = ReplicaSizes(cache_tokens=32 * 8, max_num_seqs=4, chunk_size=16, block_size=8, grain=1)
    replica = SimulatedReplica("a", sizes, TIMES)
    seen: list[float] = []
    for number, prompt in enumerate(prompts):
        replica.add(number, prompt, 5 + number)
    ended: list[int] = []
    while replica.has_work:
        outcome = replica.step()
        seen.append(outcome.seconds)
        ended += outcome.ended
    assert sorted(ended) == list(range(12))
    assert seen == pytest.approx([TIMES.seconds(work) for work, _ in observed.steps])
    assert replica.batcher.num_cached_tokens == llm.engine.stats().num_cached_tokens > 0
    assert replica.num_preemptions == llm.engine.stats().num_preemptions
    replica.blocks.check_invariants()
    assert replica.blocks.num_used_blocks == 0


def test_times_of_a_single_request_add_up() -> None:
    """One request on an idle fleet: prefill, then decodes, and two messages."""
    settings = FleetSettings(num_replicas=2, times=TIMES, sizes=ReplicaSizes(grain=1), network_seconds=0.5)
    report = Fleet(settings, [TraceRequest(0.0, 1000, 3)]).run()
    prefill = TIMES.seconds(Work(1000, 1000 * 999 / 2))
    decodes = sum(TIMES.seconds(Work(0, 0, 1, context)) for context in (1001, 1002))
    assert report.first_token.max == pytest.approx(0.5 + prefill + 0.5)
    assert report.per_token.max == pytest.approx(decodes / 2)
    assert report.seconds == pytest.approx(1.0 + prefill + decodes)
    assert report.hit_rate == 0.0


def test_prefill_and_decode_on_separate_engines() -> None:
    """The first token comes from the prefill engine; keys and values travel at the given bandwidth."""
    sizes = ReplicaSizes(grain=1)
    settings = FleetSettings(num_replicas=2, num_prefill=1, times=TIMES, sizes=sizes, network_seconds=0.5,
                             bytes_per_token=1000, bandwidth=1e6)  # fmt: skip
    report = Fleet(settings, [TraceRequest(0.0, 1000, 3)]).run()
    prefill = TIMES.seconds(Work(1000, 1000 * 999 / 2))
    assert report.first_token.max == pytest.approx(0.5 + prefill + 0.5)
    decode = TIMES.seconds(Work(0, 0, 1, 1001))
    transfer = 0.5 + 1.0  # a message, and a megabyte
    assert report.seconds == pytest.approx(0.5 + prefill + transfer + decode + 0.5)
    with pytest.raises(ConfigError, match="decode replica"):
        Fleet(FleetSettings(num_replicas=2, num_prefill=2), [TraceRequest(0.0, 10, 3)])


def conversations(count: int, turns: int) -> list[TraceRequest]:
    """Conversations that take turns; every turn has the hashes of the one before and two more."""
    requests, chance = [], random.Random(0)
    for turn in range(turns):
        for place, number in enumerate(chance.sample(range(count), count)):
            hashes = [0, *(10_000 * (number + 1) + index for index in range(2 * (turn + 1)))]
            requests.append(TraceRequest(30.0 * turn + 0.02 * place, 512 * len(hashes), 64, tuple(hashes)))
    return requests


def run(policy: str, requests: list[TraceRequest], **settings: Any) -> FleetReport:
    return Fleet(FleetSettings(policy=policy, **settings), requests).run()


def test_routing_by_prefix_finds_nearly_all_that_one_cache_finds() -> None:
    requests = conversations(25, 5)
    found = {policy: run(policy, requests).hit_rate for policy in (*POLICIES, ONE_CACHE)}
    assert found["prefix"] >= 0.95 * found[ONE_CACHE]
    assert found[ONE_CACHE] > 0.6
    assert max(found["least-loaded"], found["random"]) < 0.7 * found["prefix"]


@pytest.mark.full
def test_the_conversation_trace_keeps_nine_tenths_of_the_hits(data_dir: Path) -> None:
    requests = read_trace(data_dir / "traces" / "mooncake_conversation.jsonl", 800)
    found = {policy: run(policy, requests) for policy in (ONE_CACHE, "prefix", "least-loaded")}
    assert found["prefix"].hit_rate >= 0.9 * found[ONE_CACHE].hit_rate
    assert found["least-loaded"].hit_rate < 0.6 * found["prefix"].hit_rate
    assert found["prefix"].first_token.p50 < found["least-loaded"].first_token.p50


@pytest.mark.full
def test_a_thousand_replicas() -> None:
    hashes = [tuple(range(4 * number, 4 * number + 4)) for number in range(1100)]
    requests = [TraceRequest(0.001 * number, 2048, 64, own) for number, own in enumerate(hashes)]
    report = run("prefix", requests, num_replicas=1000, sizes=ReplicaSizes(cache_tokens=16_384))
    assert report.num_requests == 1100
    assert report.good_share == 1.0


def test_step_times_of_a_real_engine() -> None:
    llm = LLM(tiny_folder(), kernels="reference", max_model_len=64, max_num_seqs=2, block_size=8, num_blocks=40)
    steps = measure_steps(llm.engine, repetitions=2)
    assert {work.decodes for work, _ in steps} == {0.0, 1.0, 2.0}
    assert all(seconds > 0 for _, seconds in steps)
    assert max(work.prefill_tokens for work, _ in steps) >= 32
    times = StepTimes.fit(steps)
    assert times.seconds(Work(decodes=1, context_tokens=32)) > 0


@pytest.mark.full
def test_the_command_prints_and_draws(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 1000 * n, "input_length": 1024, "output_length": 64, "hash_ids": [0, n % 3]} for n in range(12)
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    picture, steps = tmp_path / "fleet.png", tmp_path / "steps.json"
    TIMES.write(steps)
    command = ["fleet", str(trace), "--replicas", "2,3", "--policy", "prefix,one cache", "--ratio", "0,1"]
    done = CliRunner().invoke(build_app(), [*command, "--steps", str(steps), "--plot", str(picture), "--json"])
    assert done.exit_code == 0, done.output
    record = json.loads(done.stdout)
    assert [one["name"] for one in record["runs"]] == [
        "2 × prefix", "2 × prefix, 1:1", "2 × one cache", "3 × prefix", "3 × prefix, 1:2", "3 × one cache",
    ]  # fmt: skip
    assert record["step_times"] == TIMES.as_dict()
    assert picture.read_bytes()[:4] == b"\x89PNG"
    shown = CliRunner().invoke(build_app(), [*command[:4], "--policy", "random"])
    assert "2 × random" in shown.output
    wrong = CliRunner().invoke(build_app(), ["fleet", str(trace), "--policy", "best"])
    assert isinstance(wrong.exception, ConfigError)


def test_work_of_a_plan_counts_pairs() -> None:
    class Item:
        def __init__(self, start: int, num_new: int) -> None:
            self.start, self.num_new = start, num_new

    class Plan:
        prefills = (Item(10, 3),)
        decodes = (Item(7, 1), Item(20, 1))

    assert work_of(Plan()) == Work(3.0, 10 + 11 + 12, 2.0, 8 + 21)  # type: ignore[arg-type]
    assert work_of(Plan(), grain=2).prefill_tokens == 6.0  # type: ignore[arg-type]
