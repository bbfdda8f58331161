"""The six laws of prefill as checkers. Each raises AssertionError when a kernel set breaks its law.

1. a token sees tokens up to its own position, none after it
2. a prompt of L tokens leaves exactly L entries per layer, and no new token
3. padding, packing, batching and chunking do not change the result
4. uninitialised entries are never read
5. decode before the prompt is complete is an error
6. prefill is deterministic
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bifolio.engine.executor import DecodeExecutor, ModelRunner, PrefillExecutor, append_batch
from bifolio.errors import PhaseError
from bifolio.kernels.interface import (
    AttentionPhase,
    AttentionShape,
    KernelSet,
    LayerAttention,
)
from bifolio.kernels.storage import CacheLayout
from bifolio.sampling_params import SamplingParams
from bifolio.schedule.orchestrators import DecodeOrchestrator, PrefillOrchestrator
from bifolio.schedule.phases import PhaseManager
from bifolio.sequence import Request, Sequence
from helpers import drain, make_engine, make_runner, open_entry, random_prompt, run_chunks, steps, tiny_loaded

VOCAB = 61
LENGTH = 14
PROMPT = random_prompt(LENGTH, vocab_size=VOCAB)
MIXTURES = (  # chunk size, token budget, order of the prompts
    (512, 512, (0, 1, 2, 3)),
    (512, 512, (3, 1, 0, 2)),
    (3, 512, (2, 3, 0, 1)),
    (1, 8, (1, 0, 3, 2)),
    (4, 9, (3, 2, 1, 0)),
)


@dataclass(frozen=True, slots=True)
class Subject:
    """A kernel set, and the largest differences that count as none. 0: bit for bit."""

    kernels: KernelSet
    repeated: float  # of logits of passes with the same shape (laws 1 and 6)
    rearranged: float  # of logprobs of a prompt in passes of other shapes (law 3)

    def runner(self, block_size: int = 4) -> tuple[ModelRunner, Any]:
        """The tiny model on a poisoned cache, and the block manager."""
        dtype = self.kernels.kv_dtype
        return make_runner(tiny_loaded(), kernels=self.kernels, block_size=block_size, poison=True, cache_dtype=dtype)

    def engine(self, **options: Any) -> Any:
        return make_engine(kernels=self.kernels, cache_dtype=self.kernels.kv_dtype, **options)

    def logits_of(self, tokens: list[int], chunk_size: int = 512) -> np.ndarray:
        runner, blocks = self.runner()
        return run_chunks(runner, open_entry(runner, blocks), tokens, chunk_size)


# -- 1. causal visibility ---------------------------------------------------------------------------------------------
def check_causal_visibility(subject: Subject, chunk_size: int, positions: Iterable[int] = range(LENGTH)) -> None:
    """Changing token i moves the logits of i and of everything after it, and of nothing before it."""
    before = subject.logits_of(PROMPT, chunk_size)
    for changed in positions:
        tokens = list(PROMPT)
        tokens[changed] = (tokens[changed] + 7) % VOCAB
        difference = np.abs(subject.logits_of(tokens, chunk_size) - before).max(axis=-1)
        assert not (difference[:changed] > subject.repeated).any(), f"law 1: a token before {changed} saw it"
        assert (difference[changed:] > 1e-3).all(), f"law 1: a token after {changed} did not see it"
    check_attention_weights(subject.kernels, LENGTH - 3)


def check_attention_weights(kernels: KernelSet, num_queries: int) -> None:
    """With values that name their position, attention's output is its weights: positive up to the query, then 0."""
    rng = np.random.default_rng(0)
    query, keys = (rng.integers(-8, 9, (n, 1, 16)).astype(np.float32) / 8 for n in (num_queries, LENGTH))
    values = np.eye(LENGTH, 16, dtype=np.float32)[:, None]
    arrays = [kernels.from_host(array) for array in (query, keys, values)]
    if kernels.array_backend == "torch":
        from bifolio.kernels.torch_dtypes import DTYPES

        arrays = [array.to(DTYPES[kernels.kv_dtype]) for array in arrays]
    storage = kernels.new_storage(CacheLayout(1, 2, 16, 1, 16, kernels.kv_dtype, poison=True))
    storage.write(0, kernels.from_host(np.arange(16, 16 + LENGTH)), *arrays[1:])
    start, count = np.array([LENGTH - num_queries], np.int32), np.array([num_queries], np.int32)
    segment = PrefillOrchestrator.lay_out(start, count, kernels.from_host(np.array([[1]], np.int32)))
    layer = LayerAttention(kernels, AttentionShape(0, 1, 1, 16, 0.25), storage)
    weights = kernels.to_host(layer.compute_paged_attention(arrays[0], segment))
    visible = np.arange(LENGTH)[None, :] <= np.arange(LENGTH - num_queries, LENGTH)[:, None]
    assert np.array_equal(weights[:, :LENGTH] > 0, visible), "law 1: attention does not end at the query"


# -- 2. exactly L entries, no new token -------------------------------------------------------------------------------
def check_entries(subject: Subject, chunk_size: int, block_size: int = 4) -> None:
    """After prefill every layer holds L written entries of the sequence, and the rest of the pool is untouched."""
    runner, blocks = subject.runner(block_size)
    entry = open_entry(runner, blocks)
    result = PrefillExecutor(runner, chunk_size).execute(PROMPT, entry)
    assert result.kv_len == entry.seq_len == LENGTH, f"law 2: {entry.seq_len} entries for {LENGTH} tokens"
    for layer in range(runner.storage.num_layers):
        for stored in (runner.storage.keys[layer], runner.storage.values[layer]):
            array = subject.kernels.to_host(stored)
            tokens = array.transpose(0, 2, 1, 3).reshape(-1, array.shape[1] * array.shape[3])
            written = np.isfinite(tokens).all(axis=-1)
            written[:block_size] = False  # block 0 is the padding target
            assert written.sum() == LENGTH, f"law 2: layer {layer} holds {written.sum()} entries"
    assert tuple(result.logits.shape) == (VOCAB,), "law 2: prefill gives the logits of the last token, not a token"


# -- 3. padding, packing, batching, chunking --------------------------------------------------------------------------
def check_independence(subject: Subject, chunk_size: int, token_budget: int, order: Iterable[int]) -> None:
    """Prompts of different lengths in one engine: each gets the prompt logprobs that it gets on its own, whole."""
    prompts = [random_prompt(length, seed=length, vocab_size=VOCAB) for length in (1, 5, 9, 14)]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, logprobs=3)

    def scores(engine: Any, which: Iterable[int]) -> dict[int, list[float]]:
        requests = {i: engine.add_request(str(i), prompts[i], params) for i in which}
        drain(engine)
        found = {}
        for i, request in requests.items():
            prompt = [entry.logprob for entry in request.prompt_logprobs[1:]]
            found[i] = prompt + [logprob for _, logprob in request.sequences[0].logprobs[0].top]
        return found

    alone = {i: scores(subject.engine(chunk_size=512, token_budget=512), [i])[i] for i in order}
    together = scores(subject.engine(chunk_size=chunk_size, token_budget=token_budget), order)
    for i in order:
        difference = np.abs(np.array(alone[i]) - np.array(together[i])).max()
        broken = not difference <= subject.rearranged  # NaN is broken too
        assert not broken, f"law 3: prompt {i} changed by {difference} in company"


def check_padding(subject: Subject) -> None:
    """Tables padded with block 0, and padding tokens that are written there, leave a sequence as it was."""
    plain = subject.logits_of(PROMPT)
    runner, blocks = subject.runner()
    entry = open_entry(runner, blocks)
    run_chunks(runner, entry, PROMPT[:6], 6)
    batch = append_batch([entry], [PROMPT[6:]], AttentionPhase.PREFILL, runner.weights.config)
    (segment,) = batch.segments
    num_padding = 2
    padded = replace(
        batch,
        token_ids=np.append(batch.token_ids, np.zeros(num_padding, np.int32)),
        positions=np.append(batch.positions, np.arange(num_padding, dtype=np.int32)),
        cache_index=np.append(batch.cache_index, np.zeros(num_padding, np.int64)),
        logit_rows=np.arange(LENGTH - 6, dtype=np.int32),
        segments=(
            replace(
                segment,
                token_end=segment.token_end + num_padding,
                query_starts=np.append(segment.query_starts, segment.query_starts[-1] + num_padding),
                context_lens=np.append(segment.context_lens, num_padding).astype(np.int32),
                block_tables=np.pad(segment.block_tables, ((0, 1), (0, 3))),  # more columns, and a row of padding
            ),
        ),
    )
    logits = subject.kernels.to_host(PrefillExecutor(runner).run(padded.to(subject.kernels)))
    difference = np.abs(logits - plain[6:]).max()
    broken = not difference <= subject.rearranged * 10  # logits are larger than logprobs
    assert not broken, f"law 3: padding changed the logits by {difference}"


# -- 4. uninitialised entries are never read --------------------------------------------------------------------------
def check_no_uninitialised_reads(
    subject: Subject, chunk_size: int, lengths: Iterable[int] = (5, 6, 7, 8), num_new: int = 8
) -> None:
    """Every block that was not written is NaN, so one such entry in any sum is NaN in the logits."""
    logits = subject.logits_of(PROMPT, chunk_size)
    assert np.isfinite(logits).all(), "law 4: an entry was read before it was written"
    engine = subject.engine(num_blocks=12, max_model_len=32, max_num_seqs=3, chunk_size=chunk_size)
    params = SamplingParams(temperature=0, max_tokens=num_new, logprobs=0, ignore_eos=True)
    for round_ in range(2):  # the second round runs on blocks that the first gave back
        requests = [engine.add_request(f"{round_}.{n}", PROMPT[:n], params) for n in lengths]
        drain(engine)
        for request in requests:
            values = [entry.logprob for entry in request.sequences[0].logprobs]
            assert len(values) == num_new, f"law 4: {request.error}"
            assert np.isfinite(values).all(), "law 4: an entry was read before it was written"


# -- 5. decode before prefill is complete is an error -----------------------------------------------------------------
def check_hard_boundary(subject: Subject) -> None:
    """Every door to decode is closed until the last token of the prompt is in the cache."""
    runner, blocks = subject.runner()
    manager = PhaseManager(PrefillOrchestrator(blocks), DecodeOrchestrator(blocks))
    request = Request("r", 0, PROMPT, SamplingParams(), 0)
    sequence = Sequence(7, request, 0, list(PROMPT), LENGTH, 0)
    manager.track(sequence)
    for computed in range(LENGTH + 1):
        sequence.num_computed = computed
        refused = False
        try:
            manager.transition_to_decode(7)
        except PhaseError:
            refused = True
        assert refused == (computed < LENGTH), f"law 5: decode with {computed} of {LENGTH} tokens computed"
    entry = open_entry(runner, blocks)
    try:
        DecodeExecutor(runner).step(entry, PROMPT[0])
    except PhaseError:
        return
    raise AssertionError("law 5: a sequence without a prompt decoded")


def check_nothing_is_drawn_early(subject: Subject) -> None:
    """The engine draws no token before the last chunk of a prompt."""
    engine = subject.engine(chunk_size=4, token_budget=8)
    request = engine.add_request("r", PROMPT, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    for number, results in enumerate(steps(engine), start=1):
        if any(result.token is not None for result in results):
            assert number >= -(-LENGTH // 4), f"law 5: a token came with step {number}, before the prompt was complete"
    assert len(request.sequences[0].output_token_ids) == 3


# -- 6. prefill is deterministic --------------------------------------------------------------------------------------
def check_determinism(subject: Subject) -> None:
    """The same prompt leaves the same numbers in the cache, wherever its blocks lie and whatever ran before."""
    images = []
    runner, blocks = subject.runner()
    for _ in range(3):
        entry = open_entry(runner, blocks)
        logits = run_chunks(runner, entry, PROMPT, 512)
        views = [view(layer) for view in (entry.keys, entry.values) for layer in range(2)]
        kept = [np.concatenate([subject.kernels.to_host(page) for page in pages], axis=1) for pages in views]
        images.append([logits, *kept])
        run_chunks(runner, open_entry(runner, blocks), PROMPT[::-1], 512)  # something else in between
    for image in images[1:]:
        worst = max(np.abs(a.astype(np.float64) - b).max() for a, b in zip(image, images[0], strict=True))
        assert worst <= subject.repeated, f"law 6: two prefills of one prompt differ by {worst}"
