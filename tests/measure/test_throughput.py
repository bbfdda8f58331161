"""Benchmark rows and random models."""

from __future__ import annotations

import numpy as np
import pytest

from bifolio.engine.memory import weight_bytes
from bifolio.errors import ConfigError
from bifolio.kernels.reference import ReferenceKernels
from bifolio.measure.latency import measure_latency
from bifolio.measure.random_models import SHAPES, open_model, random_model, stored_format
from bifolio.measure.statistics import Distribution, show_rate, show_seconds
from bifolio.measure.throughput import Test, bench_llm, bench_tests, measure, run_tests
from bifolio.quant.tensor import QuantizedTensor


def test_rows_are_named_as_in_llama_bench() -> None:
    tests = bench_tests([512], [128], [0, 1024], [1, 8])
    assert [test.name for test in tests] == [
        "pp512", "pp512 x8", "tg128", "tg128@d1024", "tg128 x8", "tg128@d1024 x8",
    ]  # fmt: skip
    assert [test.name for test in bench_tests([0], [16], [0], [1])] == ["tg16"]


def test_exactly_the_named_tokens_are_run() -> None:
    tests = [Test(num_prompt=20, batch=3), Test(num_generated=4, depth=10, batch=3)]
    engine = bench_llm(random_model("tiny"), tests, kernels=ReferenceKernels(), chunk_size=16).engine
    assert measure(engine, tests[0]) > 0
    assert engine.stats().num_prefill_tokens == 60
    measure(engine, tests[1])
    stats = engine.stats()
    assert stats.num_prefill_tokens == 60 + 30
    assert stats.num_decode_tokens >= 12
    assert (stats.num_running, stats.num_used_blocks) == (0, 0)


def test_every_repetition_is_kept() -> None:
    tests = [Test(num_prompt=8), Test(num_generated=2)]
    seen: list[tuple[str, int]] = []
    engine = bench_llm(random_model("tiny"), tests, kernels=ReferenceKernels()).engine
    rows = run_tests(engine, tests, 3, lambda test, number: seen.append((test.name, number)))
    assert [len(row.speeds) for row in rows] == [3, 3]
    assert seen == [(name, number) for name in ("pp8", "tg2") for number in range(3)]
    record = rows[0].as_dict()
    assert record["tokens_per_second"] == pytest.approx(np.mean(rows[0].speeds))
    assert record["tokens_per_second_std"] == pytest.approx(np.std(rows[0].speeds, ddof=1))


def test_a_gpu_runs_every_test_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are compiled and steps captured for the sizes of a test when it is first run."""
    tests = [Test(num_prompt=16, batch=2)]
    computed = []
    for on_gpu in (False, True):
        kernels = ReferenceKernels()
        monkeypatch.setattr(kernels, "launches_ahead", on_gpu)
        engine = bench_llm(random_model("tiny"), tests, kernels=kernels).engine
        (row,) = run_tests(engine, tests, 3)
        assert len(row.speeds) == 3
        computed.append(engine.stats().num_prefill_tokens)
    assert computed[1] - computed[0] == 32


def test_latency_counts_every_gap() -> None:
    engine = bench_llm(random_model("tiny"), [Test(8, 5, 0, 2)], kernels=ReferenceKernels()).engine
    report = measure_latency(engine, batch=2, num_prompt=8, num_output=5, repetitions=3)
    assert (report.whole.count, report.first_token.count, report.between_tokens.count) == (3, 6, 24)
    assert report.whole.p50 >= report.first_token.p50


def test_latency_on_a_gpu_begins_with_a_whole_round(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = ReferenceKernels()
    monkeypatch.setattr(kernels, "launches_ahead", True)
    engine = bench_llm(random_model("tiny"), [Test(8, 5, 0, 2)], kernels=kernels).engine
    report = measure_latency(engine, batch=2, num_prompt=8, num_output=5, repetitions=3)
    assert report.first_token.count == 6
    assert engine.stats().num_prefill_tokens == 4 * 16


@pytest.mark.parametrize(("shape", "parameters"), [("tiny", 131_392), ("S", 134_515_008), ("M", 1_235_814_400)])
def test_shapes_are_those_of_the_named_models(shape: str, parameters: int) -> None:
    """S and M have as many parameters as SmolLM2-135M and Llama-3.2-1B."""
    assert SHAPES[shape].num_parameters == parameters


@pytest.mark.parametrize("format", ["f32", "f16", "bf16", "q8_0", "q4_0"])
def test_random_weights_are_stored_as_asked_and_repeatable(format: str) -> None:
    model = random_model("tiny", format)
    assert stored_format(model) == format
    embedding = model.weights.embedding
    assert isinstance(embedding, QuantizedTensor)
    assert np.array_equal(embedding.data, random_model("tiny", format).weights.embedding.data)
    per_value = embedding.format.bits_per_element / 8
    norms = (2 * model.config.num_layers + 1) * model.config.hidden_size
    assert weight_bytes(model.weights) == pytest.approx((model.config.num_parameters - norms) * per_value)


def test_models_are_named_or_shaped_but_not_both() -> None:
    assert open_model(None, None).config == SHAPES["tiny"]
    with pytest.raises(ConfigError, match="not both"):
        open_model("stories", "tiny")
    with pytest.raises(ConfigError, match="tiny, S, M"):
        open_model(None, "XXL")


def test_distributions() -> None:
    values = [3.0, 1.0, 2.0, 10.0]
    summary = Distribution.of(values)
    assert (summary.mean, summary.p50, summary.max) == (4.0, 2.5, 10.0)
    assert summary.std == pytest.approx(np.std(values, ddof=1))
    assert Distribution.of([]).count == 0
    assert Distribution.of([2.0]).std == 0.0
    assert [show_seconds(s) for s in (2.5, 0.0123, 4.2e-5)] == ["2.50 s", "12.3 ms", "42 us"]
    assert show_rate(12.3e9, "B") == "12.3 GB/s"
