"""EAGLE-3 heads: the forward pass of the published description, and texts that are the plain run's."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bifolio import LLM, BeamSearchParams, SamplingParams, SpeculativeConfig
from bifolio.api.outputs import RequestOutput
from bifolio.api.vllm_options import speculative_from
from bifolio.config import CacheConfig
from bifolio.engine.executor import PrefillExecutor
from bifolio.engine.speculative.head_runner import HeadRun, HeadRunner
from bifolio.engine.speculative.hidden_draft import HiddenDraft
from bifolio.errors import ConfigError, ModelFileError, UnsupportedModelError
from bifolio.kernels.interface import AttentionPhase, KernelSet
from bifolio.model.draft_head import prepare_head
from bifolio.model.eagle import load_eagle
from bifolio.model.gguf.writer import write_gguf
from bifolio.model.loader import load_model
from bifolio.quant.formats import QuantFormat
from bifolio.schedule.plan import ScheduledSequence
from draft_heads import EAGLE, eagle_folder, eagle_tensors, torch_eagle
from helpers import cpu_kernel_names, make_kernels, make_runner, open_entry, random_prompt, tiny_folder, tiny_loaded

VOCAB = 61
KERNELS = [name for name in cpu_kernel_names() if name in ("reference", "native")]


@cache
def target() -> Path:
    return tiny_folder()


@cache
def head(seed: int = 0) -> Path:
    return eagle_folder(seed)


def config(**changes: Any) -> SpeculativeConfig:
    return SpeculativeConfig("eagle", draft_model=str(head()), **{"adaptive": False, "length": 3, **changes})


def make_llm(speculative: SpeculativeConfig | None, kernels: str = "reference", **options: Any) -> LLM:
    settings = {"num_blocks": 300, "block_size": 4, "max_model_len": 96, "max_num_seqs": 8, "chunk_size": 7,
                "token_budget": 40, **options}  # fmt: skip
    own: Any = make_kernels(kernels)
    return LLM(target(), kernels=own, poison_free_blocks=True, speculative=speculative, **settings)


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts with common beginnings, greedy and sampled, with n = 2 and options that look at the text so far."""
    shared = random_prompt(9, 99, VOCAB)
    prompts = [shared[: 3 * (i % 4)] + random_prompt(1 + 3 * i % 11, i, VOCAB) for i in range(10)]
    params = [
        SamplingParams(
            temperature=(0.0, 0.7, 1.2)[i % 3], seed=i, max_tokens=18, n=1 + i % 2, ignore_eos=i % 4 != 0,
            repetition_penalty=1.15 if i % 5 == 0 else 1.0, stop_token_ids=(7, 9) if i % 3 == 1 else (),
        )
        for i in range(10)
    ]  # fmt: skip
    return prompts, params


def essence(outputs: list[RequestOutput]) -> list[Any]:
    return [[(o.token_ids, o.finish_reason, o.stop_reason) for o in output.outputs] for output in outputs]


@cache
def plain(kernels: str) -> list[Any]:
    return essence(make_llm(None, kernels).generate(*requests()))


@pytest.mark.full
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("block_size", "num_blocks"), [(1, 400), (4, 300), (16, 80), (4, 30)])
def test_the_output_is_the_plain_run_s(block_size: int, num_blocks: int, kernels: str) -> None:
    """With block sizes 1, 4 and 16, and with so few blocks that sequences are preempted."""
    llm = make_llm(config(), kernels, block_size=block_size, num_blocks=num_blocks)
    for _ in range(2):  # the second time every prompt is found in the prefix cache
        assert essence(llm.generate(*requests())) == plain(kernels)
    assert llm.engine.speculator is not None
    assert llm.engine.speculator.stats.num_draft_tokens > 100
    assert llm.engine.blocks.num_used_blocks == 0
    llm.engine.blocks.check_invariants()
    if num_blocks == 30:
        assert llm.engine.stats().num_preemptions > 0


# -- the forward pass -------------------------------------------------------------------------------------------------
def target_states(kernels: KernelSet, tokens: list[int], chunk: int) -> np.ndarray:
    """The hidden states that the target gives out, chunk after chunk through the cache."""
    from dataclasses import replace

    model = tiny_loaded()
    runner, blocks = make_runner(replace(model, weights=replace(model.weights, taps=(0, 1, 2))), kernels=kernels)
    executor, entry = PrefillExecutor(runner), open_entry(runner, blocks)
    found = []

    def run(batch: Any) -> Any:
        tapped = runner.with_taps(batch)
        logits = executor.run(tapped)
        found.append(kernels.to_host(tapped.taps))
        return logits

    for start in range(0, len(tokens), chunk):
        executor.append([entry], [tokens[start : start + chunk]], run)
    return np.concatenate(found)


@pytest.mark.full
@pytest.mark.parametrize("chunk", [1, 5, 64])
@pytest.mark.parametrize("changes", [{}, {"norm_before_residual": True}], ids=["", "norm before residual"])
@pytest.mark.parametrize("kernels", cpu_kernel_names())
def test_the_head_is_the_published_one(kernels: str, changes: dict[str, Any], chunk: int) -> None:
    """Chunks of states of the target, then a chain over the head's own states, against a whole pass in torch."""
    own, tokens = make_kernels(kernels), random_prompt(24, 5, VOCAB)
    settings = {**EAGLE, **changes}
    loaded = load_eagle(eagle_folder(3, **changes), tiny_loaded())
    weights = prepare_head(loaded.weights, own, make_runner(tiny_loaded(), kernels=own)[0].weights)
    runner = HeadRunner(weights, CacheConfig(20, 4), own)
    states, table = target_states(own, tokens, chunk), np.arange(3, 15, dtype=np.int32)
    known = len(tokens) - 1  # states with a known token behind them
    for start in range(0, known, chunk):
        part = states[start : min(start + chunk, known)]
        run = HeadRun(table, 0, start, tokens[start + 1 : start + 1 + len(part)])
        phase = AttentionPhase.DECODE if chunk == 1 else AttentionPhase.PREFILL
        logits, hidden = runner.run([run], own.from_host(part), phase, own_states=False)
    embedding = tiny_loaded().weights.embedding.dequantize()  # type: ignore[union-attr]
    tensors = eagle_tensors(settings, 32, 3)
    given, drawn = states[:known], list(tokens)
    chain: list[np.ndarray] = []
    for step in range(4):
        wanted, theirs = torch_eagle(settings, tensors, embedding[drawn[1:]], given, np.array(chain) if chain else None)
        np.testing.assert_allclose(own.to_host(logits)[-1], wanted[-1], atol=1e-4)
        np.testing.assert_allclose(own.to_host(hidden)[-1], theirs[-1], atol=1e-4)
        chain.append(theirs[-1])
        drawn.append(int(loaded.weights.token_ids[wanted[-1].argmax()]))  # type: ignore[index]
        run = HeadRun(table, 0, known + step, drawn[-1:])
        logits, hidden = runner.run([run], hidden, AttentionPhase.DECODE, own_states=True)


@pytest.mark.full
@pytest.mark.parametrize("kernels", cpu_kernel_names())
def test_taps_are_the_hidden_states_of_transformers(kernels: str) -> None:
    import torch
    import transformers

    tokens = random_prompt(17, 3, VOCAB)
    model = transformers.AutoModelForCausalLM.from_pretrained(target()).float().eval()
    last: list[torch.Tensor] = []
    model.model.layers[-1].register_forward_hook(lambda module, inputs, output: last.append(output))
    with torch.no_grad():
        output = model(torch.tensor([tokens]), output_hidden_states=True)
    states = last[0][0] if isinstance(last[0], tuple) else last[0]
    wanted = torch.cat([output.hidden_states[0][0], output.hidden_states[1][0], states.reshape(len(tokens), -1)], dim=1)
    np.testing.assert_allclose(target_states(make_kernels(kernels), tokens, 6), wanted.numpy(), atol=1e-4)


# -- contexts of the head ---------------------------------------------------------------------------------------------
def drafter(llm: LLM) -> HiddenDraft:
    assert llm.engine.speculator is not None
    assert isinstance(llm.engine.speculator.drafter, HiddenDraft)
    return llm.engine.speculator.drafter


def drafts_of(llm: LLM, prompt: list[int], **options: Any) -> list[Any]:
    request = llm.engine.add_request(
        "r", prompt, SamplingParams(temperature=0, max_tokens=14, ignore_eos=True, **options)
    )
    request.steps = []
    while llm.engine.has_work:
        llm.engine.step()
    return request.steps


def test_chunks_blocks_and_prefix_hits_draft_the_same_tokens() -> None:
    prompt = random_prompt(33, 7, VOCAB)
    wanted = drafts_of(make_llm(config(), chunk_size=40, block_size=16, num_blocks=60), prompt)
    assert len(wanted) > 3
    for block_size in (1, 4):
        llm = make_llm(config(), block_size=block_size)
        assert drafts_of(llm, prompt) == wanted
        assert drafts_of(llm, prompt) == wanted  # from the prefix cache
        assert llm.engine.stats().num_cached_tokens > 30
    assert not drafter(llm)._tracks


@pytest.mark.parametrize("length", [13, 16])  # within a block, and at its end
def test_forks_draft_as_single_requests_do(length: int) -> None:
    """Both greedy completions of n = 2 read the same prompt, whose states the parent alone was given."""
    prompt = random_prompt(length, 8, VOCAB)
    wanted = [(step.position, step.drafts) for step in drafts_of(make_llm(config()), prompt)]
    found = drafts_of(make_llm(config()), prompt, n=2)
    for completion in (0, 1):
        assert [(step.position, step.drafts) for step in found if step.completion == completion] == wanted


def test_contexts_without_holes() -> None:
    llm = make_llm(config())
    blocks = drafter(llm).runner.blocks
    table = np.array([5, 9, 2, 7], np.int32)
    assert blocks.context(table, 0) == (0, 0)
    assert blocks.context(table, 9) == (8, 8)  # no entries at all: the block's own are missing
    blocks.computed(table, 0, 9)
    assert blocks.context(table, 9) == (0, 9)
    assert blocks.context(table, 11) == (0, 9)
    blocks.overwritten(table, 6, 8)
    assert blocks.context(table, 9) == (8, 9)
    assert blocks.context(table, 8) == (0, 6)
    blocks.computed(table, 7, 8)  # a hole at 6 is left
    assert blocks.context(table, 8) == (0, 6)
    blocks.move_blocks([(5, 11)])
    assert blocks.context(np.array([11], np.int32), 4) == (0, 4)


def test_states_beyond_the_limit_are_computed_or_dropped() -> None:
    prompt = random_prompt(60, 2, VOCAB)
    wanted = drafts_of(make_llm(config()), prompt)
    for is_resting in (False, True):
        llm = make_llm(config())
        own = drafter(llm)
        own._most_states = 10
        if is_resting:
            own.__class__ = _Resting
        steps = drafts_of(llm, prompt)
        assert (steps == wanted) is not is_resting  # a head that rests forgets the beginning
        assert len(steps) >= 3


class _Resting(HiddenDraft):
    """A head that always believes that drafts do not pay off."""

    _is_resting = property(lambda self: True, lambda self, value: None)  # type: ignore[assignment]


@pytest.mark.full
@pytest.mark.parametrize("kernels", KERNELS)
def test_adaptive_drafts_and_beams_leave_the_text_as_it_is(kernels: str) -> None:
    llm = make_llm(config(adaptive=True), kernels)
    assert essence(llm.generate(*requests())) == plain(kernels)
    search = BeamSearchParams(beam_width=3, max_tokens=9)
    prompts = [random_prompt(5, 1, VOCAB)]
    found, wanted = (each.beam_search(prompts, search) for each in (llm, make_llm(None, kernels)))
    assert [s.tokens for s in found[0].sequences] == [s.tokens for s in wanted[0].sequences]


# -- folders ----------------------------------------------------------------------------------------------------------
def test_layers_that_the_head_reads() -> None:
    deep = tiny_loaded(num_hidden_layers=8)
    assert load_eagle(eagle_folder(taps=(1, 3, 8)), deep).weights.taps == (1, 3, 8)
    assert load_eagle(eagle_folder(taps=None), deep).weights.taps == (2, 4, 5)
    top = eagle_folder(taps=None, eagle_aux_hidden_state_layer_ids=[2, 4, 6])
    assert load_eagle(top, deep).weights.taps == (2, 4, 6)
    with pytest.raises(ModelFileError, match="2 layers"):
        load_eagle(eagle_folder(taps=(1, 3, 8)), tiny_loaded())


def test_folders_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLMEagle3"):
        load_eagle(target(), tiny_loaded())
    with pytest.raises(ModelFileError, match="is not a folder"):
        load_eagle(tmp_path / "none", tiny_loaded())
    with pytest.raises(ConfigError, match="trained for this model"):
        load_eagle(eagle_folder(vocab_size=70), tiny_loaded())
    folder = eagle_folder()
    (folder / "config.json").write_text((folder / "config.json").read_text().replace("29", "28"))
    with pytest.raises(ModelFileError, match="'d2t' has shape"):
        load_eagle(folder, tiny_loaded())
    with pytest.raises(ConfigError, match="draft_model"):
        SpeculativeConfig("eagle")
    with pytest.raises(ConfigError, match="tensor_parallel_size 1"):
        LLM(target(), device="cpu", speculative=config(), tensor_parallel_size=2, num_blocks=40, max_model_len=32)


def test_the_head_of_a_quantised_model_is_rounded(tmp_path: Path) -> None:
    loaded = load_model(target())
    write_gguf(tmp_path / "q8.gguf", loaded, QuantFormat.Q8_0)
    exact, rounded = (load_eagle(head(), each).weights for each in (loaded, load_model(tmp_path / "q8.gguf")))
    for ours, theirs in zip(rounded.matrices(), exact.matrices(), strict=True):
        fits = ours.shape[1] % 32 == 0
        assert ours.format is (QuantFormat.Q8_0 if fits else QuantFormat.F32)  # type: ignore[union-attr]
        np.testing.assert_allclose(ours.dequantize(), theirs.dequantize(), atol=0.01)  # type: ignore[union-attr]


# -- settings -------------------------------------------------------------------------------------------------
def test_a_head_that_costs_more_than_it_saves_is_not_used() -> None:
    llm = make_llm(config(adaptive=True))
    head, fills = drafter(llm), []
    fill = head.fill

    def slow(items: Sequence[ScheduledSequence]) -> list[tuple[int, ...]]:
        fills.append(len(items))
        time.sleep(0.3)
        return fill(items)

    head.fill = slow  # type: ignore[method-assign]
    llm.generate(*requests())
    assert len(fills) <= 1


def test_vllm_s_names() -> None:
    assert speculative_from({"method": "eagle3", "model": "head", "num_speculative_tokens": 3}) == SpeculativeConfig(
        "eagle", 3, "head"
    )
    assert speculative_from({"method": "mtp"}) == SpeculativeConfig("mtp")
