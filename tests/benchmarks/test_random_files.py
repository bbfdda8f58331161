"""Files with random weights: every shape opens, in folders and in GGUF files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.limits import Limits, ModelFacts, limit_of
from benchmarks.models import ModelStore
from benchmarks.random_files import LOW_BITS, random_blocks, write_model
from benchmarks.shapes import SHAPES, tiny
from benchmarks.workload_list import WORKLOADS
from bifolio import LLM, SamplingParams
from bifolio.model.loader import load_model
from bifolio.quant.formats import QuantFormat, decode_blocks

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


def tokens_of(path: Path | str) -> list[int]:
    (output,) = LLM(path, max_model_len=64).generate([[5, 6, 7]], GREEDY, use_tqdm=False)
    return list(output.outputs[0].token_ids)


@pytest.mark.full
@pytest.mark.parametrize("shape", ["llama-8b", "qwen3-30b-a3b", "qwen3.5-9b", "qwen3-next-half", "gpt-oss-20b"])
def test_a_shape_of_a_gpu_is_a_folder_that_opens(shape: str, tmp_path: Path) -> None:
    path = ModelStore(tmp_path, tiny=True).path(shape)
    assert Path(path).is_dir()
    assert len(tokens_of(path)) == 4


@pytest.mark.full
@pytest.mark.parametrize("name", ["S-q4_0", "hybrid-q8_0", "experts-q4_k", "T-awq", "T-gptq", "T-fp8"])
def test_a_shape_of_a_cpu_is_a_file_that_opens(name: str, tmp_path: Path) -> None:
    assert len(tokens_of(ModelStore(tmp_path, tiny=True).path(name))) == 4


def test_no_two_rows_of_a_matrix_are_equal(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf", tiny(SHAPES["S"]), "q8_0")
    embedding = load_model(tmp_path / "m.gguf").weights.embedding
    rows = np.asarray(embedding.dequantize())
    assert len(np.unique(rows, axis=0)) == len(rows)
    assert np.isclose(rows.std(), rows.shape[1] ** -0.5, rtol=0.1)


@pytest.mark.parametrize("name", LOW_BITS)
def test_random_codes_are_numbers(name: str) -> None:
    format = QuantFormat[name.upper()]
    values = decode_blocks(random_blocks(format, 50, 0.02), format)
    assert np.isfinite(values).all()
    assert 0 < np.abs(values).max() < 10


def test_limits_are_bytes_over_bandwidth_and_operations_over_the_rate(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf", tiny(SHAPES["S"]), "q8_0")
    facts = ModelFacts.of(tmp_path / "m.gguf")
    config, limits = facts.config, Limits(1e6, 1e9, 2e9)
    weights = (config.num_parameters - 128 * 5) * 34 / 32  # five norms are no matrices; the embedding is the head
    assert facts.weight_bytes == weights
    cached = 2 * config.num_layers * config.kv_size * 2
    decode = limit_of(WORKLOADS["decode1"], facts, limits)
    assert decode == pytest.approx(1e6 / (weights + (64 + 32) * cached))
    prefill = limit_of(WORKLOADS["prefill512"], facts, limits)
    head = config.vocab_size * config.hidden_size
    operations = 2 * (config.num_parameters - head) * 512 + 2 * head
    operations += 2 * config.num_layers * config.query_size * 512**2
    assert prefill == pytest.approx(512 * 2e9 / operations, rel=1e-3)
    assert limit_of(WORKLOADS["start"], facts, limits) is None
