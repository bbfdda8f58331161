"""The classes of the specs carry real requests: every run below is watched, and each class must have done its work."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from bifolio.beam_params import BeamSearchParams
from bifolio.cache.block_manager import KVCacheBlockManager
from bifolio.cache.block_table import BlockTable
from bifolio.cache.sharing import BeamSearchBlockSharing, BlockShareManager, SpeculativeDecodingSharing
from bifolio.cache.storage import KvCacheEntry, Page
from bifolio.config import SpeculativeConfig
from bifolio.engine.engine import InferenceEngine
from bifolio.engine.executor import DecodeExecutor, PrefillExecutor
from bifolio.sampling_params import SamplingParams
from bifolio.schedule.batcher import ContinuousBatcher
from bifolio.schedule.orchestrators import DecodeOrchestrator, PrefillOrchestrator
from bifolio.schedule.phases import PhaseManager
from bifolio.sequence import SequencePhase
from bifolio.serve.views.snapshot import blocks_of
from helpers import drain, make_engine, make_kernels, output_ids, random_prompt, run_alone, tiny_loaded

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
WATCHED: dict[type, tuple[str, ...]] = {
    KVCacheBlockManager: ("try_append_many", "fork", "truncate", "release", "commit", "run_moves"),
    BlockTable: ("__init__", "take_changes"),
    BlockShareManager: ("get_stats",),
    BeamSearchBlockSharing: ("initialize_beams", "reorder_beams", "cleanup_beams"),
    SpeculativeDecodingSharing: ("allocate_speculative_blocks", "verify_speculation"),
    PrefillOrchestrator: ("reserve_chunk",),
    DecodeOrchestrator: ("reserve",),
    PhaseManager: ("plan", "transition_to_decode"),
    ContinuousBatcher: ("step", "admit_pending", "evict_completed"),
    PrefillExecutor: ("launch", "append", "chunks"),
    DecodeExecutor: ("launch", "append"),
    KvCacheEntry: ("reserve", "truncate"),
}


class Watch:
    """Counts calls by class and method, and notes the module that each came from."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: Counter[str] = Counter()
        self.callers: dict[str, set[str]] = {}
        for owner, names in WATCHED.items():
            for name in names:
                monkeypatch.setattr(owner, name, self._watched(f"{owner.__name__}.{name}", getattr(owner, name)))

    def _watched(self, label: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.calls[label] += 1
            self.callers.setdefault(label, set()).add(sys._getframe(1).f_globals["__name__"])
            return method(*arguments, **options)

        return call


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(monkeypatch)


def common_work(watch: Watch, engine: InferenceEngine) -> None:
    """The calls that every request makes."""
    for label in ("ContinuousBatcher.step", "PhaseManager.plan", "PhaseManager.transition_to_decode",
                  "PrefillOrchestrator.reserve_chunk", "DecodeOrchestrator.reserve", "PrefillExecutor.launch",
                  "DecodeExecutor.launch", "BlockTable.__init__", "KVCacheBlockManager.release",
                  "BlockTable.take_changes", "KVCacheBlockManager.run_moves"):  # fmt: skip
        assert watch.calls[label] > 0, label
    steps = engine.stats().num_steps
    assert watch.calls["PrefillExecutor.launch"] + watch.calls["DecodeExecutor.launch"] == steps
    assert watch.calls["ContinuousBatcher.step"] >= steps
    assert engine.blocks.num_used_blocks == 0


def test_two_samples(watch: Watch) -> None:
    engine = make_engine()
    params = SamplingParams(n=2, temperature=1.0, seed=3, max_tokens=8, ignore_eos=True)
    request = engine.add_request("r", random_prompt(9, vocab_size=61), params)
    engine.step()
    shares = engine.stats().sharing
    assert (shares.total_shared_blocks, shares.average_reference_count) == (3, 2.0)
    for sequence in request.sequences:
        assert isinstance(engine.blocks.table(sequence.id), BlockTable)
        assert engine.phases.get_phase(sequence.id) is SequencePhase.DECODE
    drain(engine)
    common_work(watch, engine)
    assert watch.calls["BlockTable.__init__"] == 2
    assert watch.calls["KVCacheBlockManager.fork"] == 1
    assert watch.calls["PhaseManager.transition_to_decode"] == 2
    assert watch.callers["BlockShareManager.get_stats"] == {"bifolio.engine.engine"}


def test_four_beams(watch: Watch) -> None:
    engine = make_engine()
    engine.add_beam_search("b", random_prompt(9, vocab_size=61), BeamSearchParams(beam_width=4, max_tokens=10))
    drain(engine)
    common_work(watch, engine)
    assert watch.calls["BeamSearchBlockSharing.initialize_beams"] == 1
    assert watch.calls["BeamSearchBlockSharing.reorder_beams"] > 3
    assert watch.calls["BeamSearchBlockSharing.cleanup_beams"] == 1
    assert watch.callers["KVCacheBlockManager.fork"] == {"bifolio.cache.sharing"}
    assert watch.callers["KVCacheBlockManager.truncate"] == {"bifolio.cache.sharing"}


@pytest.mark.parametrize("method", ["ngram", "draft"])
def test_drafts(watch: Watch, method: Any) -> None:
    config = SpeculativeConfig(method, length=3, adaptive=False)
    engine = make_engine(speculative=config, **({"draft_model": tiny_loaded(seed=7)} if method == "draft" else {}))
    prompt = [7, 8, 9] * 4
    request = engine.add_request("d", prompt, GREEDY)
    drain(engine)
    common_work(watch, engine)
    allocated = watch.calls["SpeculativeDecodingSharing.allocate_speculative_blocks"]
    assert allocated == watch.calls["SpeculativeDecodingSharing.verify_speculation"] > 0
    assert watch.callers["KVCacheBlockManager.truncate"] == {"bifolio.cache.sharing"}
    assert output_ids(request) == output_ids(run_alone(prompt, GREEDY))


def test_the_live_page_reads_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    engine.add_request("r", random_prompt(9, vocab_size=61), GREEDY)
    engine.step()
    seen: list[Page] = []
    pages = engine.blocks.pages

    def watched() -> list[Page]:
        seen.extend(pages())
        return seen

    monkeypatch.setattr(engine.blocks, "pages", watched)
    states = blocks_of(engine)[::2]
    assert [page.used_slots for page in seen] == [4, 4, 1]
    assert all(isinstance(page, Page) for page in seen)
    assert sum(state > 1 for state in states) == 3
    drain(engine)


def test_vectors_are_planned_in_chunks_as_all_prompts(watch: Watch) -> None:
    from bifolio.pooling_params import PoolingParams

    engine = make_engine(chunk_size=4, kernels=make_kernels())
    request = engine.add_request("e", random_prompt(9, vocab_size=61), PoolingParams())
    drain(engine)
    assert request.pooling.value is not None
    assert watch.calls["PrefillOrchestrator.reserve_chunk"] == 3
    assert engine.blocks.num_used_blocks == 0


def test_the_language_model_decodes_on_the_executors(watch: Watch) -> None:
    torch = pytest.importorskip("torch")
    from bifolio.api.language_model import LanguageModel

    model = LanguageModel(seed=0)
    model.decode(torch.zeros((2, 5), dtype=torch.long), 6, temperature=0)
    assert watch.calls["PrefillExecutor.append"] == 1
    assert watch.calls["DecodeExecutor.append"] == 5
