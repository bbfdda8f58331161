"""The six laws of prefill. Each has a checker, a test that the product obeys it, and a test that the checker notices.

    1. a token sees tokens up to its own position, none after it
    2. a prompt of L tokens leaves exactly L entries per layer, and no new token
    3. padding, packing, batching and chunking do not change the result
    4. uninitialised entries are never read
    5. decode before the prompt is complete is an error
    6. prefill is deterministic

A checker raises AssertionError when its law is broken. The second test of each law breaks it on purpose.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import bifolio.kernels.reference as reference
from bifolio.cache.storage import KVStorage
from bifolio.engine import executor
from bifolio.engine.executor import DecodeExecutor, ModelRunner, PrefillExecutor, append_batch
from bifolio.errors import PhaseError
from bifolio.kernels.interface import AttentionPhase
from bifolio.sampling_params import SamplingParams
from bifolio.schedule.orchestrators import DecodeOrchestrator, PrefillOrchestrator
from bifolio.schedule.phases import PhaseManager
from bifolio.sequence import Request, Sequence
from helpers import drain, make_engine, make_runner, open_entry, random_prompt, run_chunks, tiny_loaded

VOCAB = 61
LENGTH = 14
PROMPT = random_prompt(LENGTH, vocab_size=VOCAB)


def logits_of(tokens: list[int], chunk_size: int = 512) -> np.ndarray:
    runner, blocks = make_runner(tiny_loaded(), poison=True)
    return run_chunks(runner, open_entry(runner, blocks), tokens, chunk_size)


def expect_broken(check: Any, *arguments: Any) -> None:
    with pytest.raises(AssertionError, match="law"):
        check(*arguments)


# -- 1. causal visibility --------------------------------------------------------------------------------------


def check_causal_visibility(chunk_size: int) -> None:
    """Changing token i moves the logits of i and of everything after it, and of nothing before it."""
    before = logits_of(PROMPT, chunk_size)
    for changed in range(LENGTH):
        tokens = list(PROMPT)
        tokens[changed] = (tokens[changed] + 7) % VOCAB
        difference = np.abs(logits_of(tokens, chunk_size) - before).max(axis=-1)
        assert not (difference[:changed] > 0).any(), f"law 1: a token before {changed} saw it"
        assert (difference[changed:] > 1e-4).all(), f"law 1: a token after {changed} did not see it"
    check_attention_weights(LENGTH - 3)


def check_attention_weights(num_queries: int) -> None:
    """With values that name their position, attention's output is its weights: positive up to the query, then 0."""
    rng = np.random.default_rng(0)
    query, key = (rng.standard_normal((n, 1, 16), np.float32) for n in (num_queries, LENGTH))
    weights = reference.causal_attention(query, key, np.eye(LENGTH, 16, dtype=np.float32)[:, None], 0.25, None)
    visible = np.arange(LENGTH)[None, :] <= np.arange(LENGTH - num_queries, LENGTH)[:, None]
    assert np.array_equal(weights[:, :LENGTH] > 0, visible), "law 1: attention does not end at the query"


@pytest.mark.parametrize("chunk_size", [1, 4, LENGTH])
def test_a_token_sees_tokens_up_to_its_own_position(chunk_size: int) -> None:
    check_causal_visibility(chunk_size)


@pytest.mark.parametrize("shift", [1, -1])
def test_a_mask_off_by_one_breaks_the_first_law(monkeypatch: pytest.MonkeyPatch, shift: int) -> None:
    def broken(num_queries: int, length: int, window: int | None) -> np.ndarray:
        mask = np.tri(num_queries, length, length - num_queries + shift, dtype=bool)
        mask[:, 0] = True
        return mask

    monkeypatch.setattr(reference, "causal_mask", broken)
    expect_broken(check_causal_visibility, LENGTH)


# -- 2. exactly L entries, no new token ------------------------------------------------------------------------


def check_entries(chunk_size: int, block_size: int = 4) -> None:
    """After prefill every layer holds L written entries of the sequence, and the rest of the pool is untouched."""
    runner, blocks = make_runner(tiny_loaded(), block_size=block_size, poison=True)
    entry = open_entry(runner, blocks)
    result = PrefillExecutor(runner, chunk_size).execute(PROMPT, entry)
    assert result.kv_len == entry.seq_len == LENGTH, f"law 2: {entry.seq_len} entries for {LENGTH} tokens"
    for layer in range(runner.storage.num_layers):
        for array in (runner.storage.keys[layer], runner.storage.values[layer]):
            tokens = array.transpose(0, 2, 1, 3).reshape(-1, array.shape[1] * array.shape[3])
            written = np.isfinite(tokens).all(axis=-1)
            written[:block_size] = False  # block 0 is the padding target
            assert written.sum() == LENGTH, f"law 2: layer {layer} holds {written.sum()} entries"
    assert result.logits.shape == (VOCAB,), "law 2: prefill gives the logits of the last token, not a token"


@pytest.mark.parametrize("chunk_size", [1, 3, LENGTH, 512])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_a_prompt_leaves_exactly_its_length_in_every_layer(chunk_size: int, block_size: int) -> None:
    check_entries(chunk_size, block_size)


@pytest.mark.parametrize("tokens_written", [LENGTH - 1, LENGTH + 1])
def test_one_entry_too_few_or_too_many_breaks_the_second_law(
    monkeypatch: pytest.MonkeyPatch, tokens_written: int
) -> None:
    honest = KVStorage.write

    def broken(self: KVStorage, layer: int, slots: Any, keys: Any, values: Any) -> None:
        if tokens_written < len(slots):
            honest(self, layer, slots[:-1], keys[:-1], values[:-1])
        else:
            honest(
                self, layer, np.append(slots, slots[-1] + 1), *(np.append(x, x[-1:], axis=0) for x in (keys, values))
            )

    monkeypatch.setattr(KVStorage, "write", broken)
    expect_broken(check_entries, 512)


def test_a_generated_token_in_the_cache_breaks_the_second_law(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = PrefillExecutor.execute

    def broken(self: PrefillExecutor, tokens: Any, kv_cache: Any) -> Any:
        result = honest(self, tokens, kv_cache)
        self.append([kv_cache], [[int(result.logits.argmax())]])
        return result

    monkeypatch.setattr(PrefillExecutor, "execute", broken)
    expect_broken(check_entries, 512)


# -- 3. padding, packing, batching, chunking -------------------------------------------------------------------


def check_independence(chunk_size: int, token_budget: int, order: list[int]) -> None:
    """Prompts of different lengths in one engine: each gets the prompt logprobs that it gets on its own, whole."""
    prompts = [random_prompt(length, seed=length, vocab_size=VOCAB) for length in (1, 5, 9, 14)]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, logprobs=3)

    def scores(engine: Any, which: list[int]) -> dict[int, list[float]]:
        requests = {i: engine.add_request(str(i), prompts[i], params) for i in which}
        drain(engine)
        found = {}
        for i, request in requests.items():
            prompt = [entry.logprob for entry in request.prompt_logprobs[1:]]
            found[i] = prompt + [logprob for _, logprob in request.sequences[0].logprobs[0].top]
        return found

    alone = {i: scores(make_engine(chunk_size=512, token_budget=512), [i])[i] for i in order}
    together = scores(make_engine(chunk_size=chunk_size, token_budget=token_budget), order)
    for i in order:
        difference = np.abs(np.array(alone[i]) - np.array(together[i])).max()
        assert difference < 1e-5, f"law 3: prompt {i} changed by {difference} in company"  # NaN is not < 1e-5 either


@pytest.mark.parametrize(
    ("chunk_size", "token_budget", "order"),
    [
        (512, 512, [0, 1, 2, 3]),
        (512, 512, [3, 1, 0, 2]),
        (3, 512, [2, 3, 0, 1]),
        (1, 8, [1, 0, 3, 2]),
        (4, 9, [3, 2, 1, 0]),
    ],
)
def test_packing_batching_and_chunking_change_nothing(chunk_size: int, token_budget: int, order: list[int]) -> None:
    check_independence(chunk_size, token_budget, order)


def test_padding_changes_nothing() -> None:
    """Tables padded with block 0, and padding tokens that are written there, leave a sequence as it was."""
    plain = logits_of(PROMPT)
    runner, blocks = make_runner(tiny_loaded(), poison=True)
    entry = open_entry(runner, blocks)
    run_chunks(runner, entry, PROMPT[:6], 6)
    batch = append_batch([entry], [PROMPT[6:]], AttentionPhase.PREFILL, VOCAB).to(runner.kernels)
    (segment,) = batch.segments
    tables = np.pad(segment.block_tables, ((0, 1), (0, 3)))  # more columns, and a row of padding
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
                block_tables=tables,
            ),
        ),
    )
    np.testing.assert_allclose(runner.run(padded), plain[6:], atol=1e-5)


@pytest.mark.parametrize("bug", ["neighbours", "forgotten chunk"])
def test_looking_at_neighbours_or_forgetting_a_chunk_breaks_the_third_law(
    monkeypatch: pytest.MonkeyPatch, bug: str
) -> None:
    honest = reference.ReferenceKernels.attend

    def neighbours(self: Any, heads: Any, shape: Any, segments: Any, storage: Any) -> Any:
        """One sequence out of a packed segment of several."""
        total = heads.query.shape[0]
        return reference.causal_attention(heads.query, heads.key, heads.value, shape.scale, None)[:total]

    def forgotten(self: Any, heads: Any, shape: Any, segments: Any, storage: Any) -> Any:
        """Every chunk taken for the beginning of its prompt."""
        return honest(self, heads, shape, tuple(replace(segment, fresh=True) for segment in segments), storage)

    monkeypatch.setattr(reference.ReferenceKernels, "attend", neighbours if bug == "neighbours" else forgotten)
    expect_broken(check_independence, 3, 512, [0, 1, 2, 3])


# -- 4. uninitialised entries are never read -------------------------------------------------------------------


def check_no_uninitialised_reads(chunk_size: int) -> None:
    """Every block that nobody wrote is NaN, so one such entry in any sum is NaN in the logits."""
    logits = logits_of(PROMPT, chunk_size)
    assert np.isfinite(logits).all(), "law 4: an entry was read that nobody had written"
    engine = make_engine(num_blocks=12, max_model_len=32, max_num_seqs=3, chunk_size=chunk_size)
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=0, ignore_eos=True)
    for round_ in range(2):  # the second round runs on blocks that the first gave back
        requests = [engine.add_request(f"{round_}.{i}", PROMPT[: 5 + i], params) for i in range(4)]
        drain(engine)
        for request in requests:
            values = [entry.logprob for entry in request.sequences[0].logprobs]
            assert len(values) == 8, f"law 4: {request.error}"
            assert np.isfinite(values).all(), "law 4: an entry was read that nobody had written"


@pytest.mark.parametrize("chunk_size", [1, 5, 512])
def test_uninitialised_entries_are_never_read(chunk_size: int) -> None:
    check_no_uninitialised_reads(chunk_size)


def test_gathering_one_token_too_many_breaks_the_fourth_law(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = KVStorage.gather

    def broken(self: KVStorage, layer: int, block_ids: Any, length: int) -> Any:
        return honest(self, layer, block_ids, min(length + 1, len(block_ids) * self.block_size))

    monkeypatch.setattr(KVStorage, "gather", broken)
    expect_broken(check_no_uninitialised_reads, 5)


def test_a_pass_that_reads_before_it_writes_breaks_the_fourth_law(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = append_batch

    def broken(*arguments: Any) -> Any:
        batch = honest(*arguments)
        return replace(batch, cache_index=np.zeros_like(batch.cache_index))  # K and V go to the padding block

    monkeypatch.setattr(executor, "append_batch", broken)
    expect_broken(check_no_uninitialised_reads, 5)


# -- 5. decode before prefill is complete is an error ----------------------------------------------------------


def check_hard_boundary() -> None:
    """Every door to decode is closed until the last token of the prompt is in the cache."""
    runner, blocks = make_runner(tiny_loaded(), poison=True)
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


def test_decode_before_the_prompt_is_complete_is_an_error() -> None:
    check_hard_boundary()


def test_the_engine_draws_nothing_before_the_prompt_is_complete() -> None:
    engine = make_engine(chunk_size=4, token_budget=8)
    engine.add_request("r", PROMPT, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    for _ in range(-(-LENGTH // 4) - 1):
        assert engine.step() == []
    assert [result.token is not None for result in engine.step()] == [True]


@pytest.mark.parametrize("door", ["manager", "executor"])
def test_an_open_door_breaks_the_fifth_law(monkeypatch: pytest.MonkeyPatch, door: str) -> None:
    if door == "manager":
        monkeypatch.setattr(PhaseManager, "transition_to_decode", lambda self, sequence_id: None)
    else:
        monkeypatch.setattr(DecodeExecutor, "step", lambda self, kv_cache, token: 0)
    expect_broken(check_hard_boundary)


# -- 6. prefill is deterministic ---------------------------------------------------------------------------------


def check_determinism() -> None:
    """The same prompt leaves the same bits in the cache, wherever its blocks lie and whatever ran before."""
    images = []
    runner, blocks = make_runner(tiny_loaded(), poison=True)
    for _ in range(3):
        entry = open_entry(runner, blocks)
        logits = run_chunks(runner, entry, PROMPT, 512)
        kept = [np.concatenate(view(layer), axis=1) for view in (entry.keys, entry.values) for layer in range(2)]
        images.append([logits, *kept])
        run_chunks(runner, open_entry(runner, blocks), PROMPT[::-1], 512)  # something else in between
    for image in images[1:]:
        same = all(np.array_equal(a, b) for a, b in zip(image, images[0], strict=True))
        assert same, "law 6: two prefills of one prompt differ"


def test_prefill_is_deterministic() -> None:
    check_determinism()


def test_noise_in_the_cache_breaks_the_sixth_law(monkeypatch: pytest.MonkeyPatch) -> None:
    honest, rng = ModelRunner.run, np.random.default_rng(0)

    def broken(self: ModelRunner, batch: Any) -> Any:
        return honest(self, batch) + rng.standard_normal() * np.float32(1e-6)

    monkeypatch.setattr(ModelRunner, "run", broken)
    expect_broken(check_determinism)
