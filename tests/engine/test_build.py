"""From settings to an engine: sizes that suit the device, and a GPU's memory counted before it is taken."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bifolio import LLM, SamplingParams
from bifolio.config import CacheConfig, EngineConfig, ModelConfig, RopeConfig
from bifolio.engine.build import resolve_sizes
from bifolio.engine.device_memory import decode_batch, measure_step, move_to_device, padding_cache, prefill_batch
from bifolio.engine.memory import plan_gpu_memory
from bifolio.errors import ConfigError
from bifolio.kernels.reference import ReferenceKernels
from bifolio.model import loaded
from bifolio.model.loader import load_model
from helpers import random_prompt, tiny_folder, tiny_loaded
from hybrid_models import tiny_hybrid

CONFIG = ModelConfig("llama", 1000, 64, 4, 8, 2, 16, 128, 4096, ropes=(RopeConfig(rotary_dim=16),))
PER_BLOCK = 64 * 2 * 4 * 2 * 16 * 2  # tokens, keys and values, layers, heads, head size, bytes
GPU: Any = SimpleNamespace(device="cuda:1", array_backend="torch", name="triton")
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def test_sizes_follow_the_device_and_what_is_asked_for() -> None:
    assert resolve_sizes(ReferenceKernels()) == (16, 16, 512, 512)
    assert resolve_sizes(GPU) == (64, 256, 8192, 8192)
    assert resolve_sizes(GPU, 16, 4, 100) == (16, 4, 100, 100)
    assert resolve_sizes(GPU, token_budget=1000) == (64, 256, 1000, 1000)
    assert resolve_sizes(GPU, chunk_size=100) == (64, 256, 100, 256)
    assert resolve_sizes(ReferenceKernels(), max_num_seqs=600) == (16, 600, 512, 600)


# -- the plan -------------------------------------------------------------------------------------------------------
def plan(**options: Any) -> Any:
    usual: dict[str, Any] = {
        "weight_bytes": 10**9,
        "free_bytes": 10**9,
        "step_bytes": 10**8,
        "utilisation": 0.9,
        "block_size": 64,
        "kv_dtype": "bf16",
        "max_model_len": 4096,
        "max_num_seqs": 1000,
    }
    return plan_gpu_memory(CONFIG, **{**usual, **options})


def test_the_cache_takes_a_share_of_what_weights_and_steps_leave() -> None:
    result = plan()
    assert result.bytes_per_block == PER_BLOCK
    assert 0.9 * 9e8 - PER_BLOCK < result.cache_bytes <= 0.9 * 9e8
    assert plan(utilisation=0.45).num_blocks == pytest.approx(result.num_blocks / 2, abs=1)
    assert "100 MB" in "\n".join(result.lines())
    assert plan(draft=CONFIG).num_blocks == pytest.approx(result.num_blocks / 2, abs=1)


def test_more_blocks_than_could_be_used_are_not_taken() -> None:
    assert plan(max_num_seqs=2).max_cached_tokens <= 2 * 2 * 4096 + 64


def test_what_does_not_fit_is_refused_with_numbers() -> None:
    with pytest.raises(ConfigError, match=r"needs 65: pass max_model_len <= \d+, a smaller token_budget") as caught:
        plan(free_bytes=101_500_000)
    fits = int(str(caught.value).split("max_model_len <= ")[1].split(",")[0])
    assert plan(free_bytes=101_500_000, max_model_len=fits).max_cached_tokens >= fits
    with pytest.raises(ConfigError, match=r"1 GB.*the GPU has 50 MB free"):
        plan(free_bytes=50_000_000)
    for share in (0.0, -1.0, 1.1):
        with pytest.raises(ConfigError, match="gpu_memory_utilization"):
            plan(utilisation=share)


# -- measuring ------------------------------------------------------------------------------------------------------
class Counter:
    """Memory that says what it is told to."""

    def __init__(self, free: int, peak: int) -> None:
        self._free, self._peak, self.calls = free, peak, []  # type: ignore[var-annotated]

    def free_bytes(self) -> int:
        self.calls.append("free")
        return self._free

    def start_peak(self) -> None:
        self.calls.append("start")

    def peak_bytes(self) -> int:
        self.calls.append("peak")
        return self._peak


def engine_config(**options: Any) -> EngineConfig:
    return EngineConfig(CacheConfig(1000, 4), 32, **{"max_num_seqs": 5, "token_budget": 70, **options})


def test_the_largest_step_is_tried() -> None:
    config, kernels = engine_config(), ReferenceKernels()
    cache = padding_cache(CONFIG, config)
    prefill = prefill_batch(config, cache)
    assert prefill.num_tokens == 70
    assert prefill.segments[0].context_lens.tolist() == [32, 32, 32]  # the last one has a prefix
    assert prefill.segments[0].query_starts.tolist() == [0, 32, 64, 70]
    assert len(prefill.logit_rows) == 5  # type: ignore[arg-type]
    decode = decode_batch(config, cache)
    assert (decode.num_tokens, decode.segments[0].max_query_len) == (5, 1)
    memory = Counter(0, 1000)
    assert measure_step(tiny_loaded(), kernels, config, memory) == 1250
    assert memory.calls == ["start", "peak"]


@pytest.mark.parametrize("max_model_len", [70, 2048, 16384])
def test_tables_of_the_tried_step_cover_its_contexts(max_model_len: int) -> None:
    """Kernels that read every key through the table, as in deterministic mode, find an entry for every token."""
    config = EngineConfig(CacheConfig(1000, 64), max_model_len, max_num_seqs=256, token_budget=8192)
    cache = padding_cache(CONFIG, config)
    for batch in (prefill_batch(config, cache), decode_batch(config, cache)):
        (segment,) = batch.segments
        tables = segment.block_tables
        assert tables is not None
        assert tables.shape[0] == segment.num_sequences
        assert tables.shape[1] * 64 >= segment.context_lens.max() == segment.max_context_len
        assert not tables.any()  # the padding block: the cache of this step has two
        assert batch.cache_index is not None
        assert 0 <= batch.cache_index.min() <= batch.cache_index.max() < 64
    assert prefill_batch(config, cache).segments[0].max_context_len == max_model_len


@pytest.mark.parametrize("kind", ["conv", "delta", "mamba"])
def test_the_tried_step_of_a_hybrid_model_has_its_states(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels on a device read and write the states that the batch names, whatever the measured cache holds."""
    kernels, seen = ReferenceKernels(), list[int]()
    recur = kernels.recur

    def checked(x: Any, recurrence: Any, batch: Any, storage: Any) -> Any:
        assert batch.states is not None
        used = {*batch.states.reads.tolist(), *batch.states.writes.tolist()} - {-1}
        assert used == {0, 1}  # the empty state and the one for padding
        assert storage.layout.num_states == len(storage.recurrent[recurrence.layer]) == 2
        seen.append(batch.num_tokens)
        return recur(x, recurrence, batch, storage)

    monkeypatch.setattr(kernels, "recur", checked)
    assert measure_step(tiny_hybrid(kind), kernels, engine_config(), Counter(0, 1000)) == 1250
    assert set(seen) == {70, 5}  # a prefill of the budget and a decode of all slots


def test_weights_and_steps_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> Any:
        raise RuntimeError("CUDA error: out of memory")

    kernels = ReferenceKernels()
    monkeypatch.setattr(kernels, "prepare_linear", full, raising=False)
    with pytest.raises(ConfigError, match="do not fit on cpu: use a smaller or a quantised model"):
        move_to_device(tiny_loaded(), kernels)
    kernels = ReferenceKernels()
    monkeypatch.setattr(kernels, "attend", full, raising=False)
    with pytest.raises(ConfigError, match="token_budget=70 tokens and max_num_seqs=5 sequences does not fit"):
        measure_step(tiny_loaded(), kernels, engine_config(), Counter(0, 0))


@pytest.mark.full
def test_an_engine_on_a_gpu_is_built_by_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that is none: weights are moved once, a step is tried, and the cache is what the plan says."""
    torch_reference = pytest.importorskip("bifolio.kernels.torch_reference")
    model = tiny_loaded()
    expected = LLM(model, kernels=ReferenceKernels()).generate([random_prompt(9, vocab_size=61)], GREEDY)
    memory = Counter(50_000_000, 1_000_000)
    kernels = torch_reference.TorchKernels("cpu")
    monkeypatch.setattr(kernels, "memory", lambda: memory)
    options = {"kernels": kernels, "dtype": "f32", "block_size": 64, "max_num_seqs": 8, "token_budget": 64}
    llm = LLM(model, gpu_memory_utilization=0.5, **options)
    assert memory.calls == ["start", "peak", "free"]
    assert llm.plan.step_bytes == 1_250_000
    assert llm.engine.blocks.num_blocks == llm.plan.num_blocks
    assert llm.engine.runner.weights.prepared_for is kernels
    assert llm.engine.runner.weights is llm.engine.model.weights  # prepared once
    outputs = llm.generate([random_prompt(9, vocab_size=61)], GREEDY)
    assert outputs[0].outputs[0].token_ids == expected[0].outputs[0].token_ids
    given = LLM(model, num_blocks=40, **options)
    assert given.engine.blocks.num_blocks == 40
    assert memory.calls == ["start", "peak", "free"]  # nothing to measure


def test_the_digest_of_the_files_is_read_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start reads no file twice; the digest is that of the files, also when the device holds other weights."""
    model, honest, calls = load_model(tiny_folder()), loaded.digest_of, list[int]()
    expected = model.digest()
    assert expected != load_model(tiny_folder(seed=1)).digest()

    def counted(beginnings: Any) -> bytes:
        calls.append(len(beginnings))
        return honest(beginnings)

    monkeypatch.setattr(loaded, "digest_of", counted)
    moved = move_to_device(model, ReferenceKernels())
    assert calls == []
    assert moved.digest() == expected
    assert calls == [len(model.weights.matrices())]
