"""The two executors: a prompt into one sequence's cache, then one token at a time out of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bifolio.engine.executor import DecodeExecutor, ModelRunner, PrefillExecutor
from bifolio.errors import ConfigError, EmptyPromptError, OutOfBlocksError, PhaseError, TokenIdError
from bifolio.sampling_params import SamplingParams
from helpers import make_runner, open_entry, output_ids, random_prompt, run_alone, run_chunks, tiny_loaded

PROMPT = random_prompt(11, vocab_size=61)


@pytest.fixture
def setup():  # type: ignore[no-untyped-def]
    runner, blocks = make_runner(tiny_loaded(), poison=True)
    return runner, blocks, open_entry(runner, blocks)


def test_prefill_processes_full_prompt(setup) -> None:  # type: ignore[no-untyped-def]
    runner, blocks, entry = setup
    result = PrefillExecutor(runner, 4).execute(PROMPT, entry)
    assert result.kv_len == len(PROMPT)
    every = run_chunks(runner, open_entry(runner, blocks), PROMPT, 512)
    np.testing.assert_allclose(result.logits, every[-1], atol=1e-5)


def test_prefill_populates_kv_cache(setup) -> None:  # type: ignore[no-untyped-def]
    runner, _, entry = setup
    PrefillExecutor(runner).execute(PROMPT, entry)
    assert entry.seq_len == 11
    for layer in range(runner.storage.num_layers):
        for pages in (entry.keys(layer), entry.values(layer)):
            assert [page.shape[1] for page in pages] == [4, 4, 3]
            assert all(np.isfinite(page).all() for page in pages)
    assert [page.used_slots for page in entry.pages()] == [4, 4, 3]


def test_decode_uses_prefill_kv(setup) -> None:  # type: ignore[no-untyped-def]
    runner, blocks, entry = setup
    first = int(PrefillExecutor(runner).execute(PROMPT, entry).logits.argmax())
    second = DecodeExecutor(runner).step(entry, first)
    whole = run_chunks(runner, open_entry(runner, blocks), [*PROMPT, first], 512)
    assert second == int(whole[-1].argmax())
    assert entry.seq_len == 12
    other = open_entry(runner, blocks)
    PrefillExecutor(runner).execute(PROMPT, other)
    runner.storage.values[0][other.block_ids[0]] += 3.0  # what prefill wrote decides what decode says
    changed = run_chunks(runner, other, [first], 1, decode=True)
    assert np.abs(changed[-1] - whole[-1]).max() > 1e-2


def test_prefill_chunk_size_affects_parallelism(setup, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    runner, blocks, _ = setup
    honest, sizes = ModelRunner.run, []
    monkeypatch.setattr(ModelRunner, "run", lambda self, batch: sizes.append(batch.num_tokens) or honest(self, batch))
    for chunk_size, expected in ((1, [1] * 11), (4, [4, 4, 3]), (10, [10, 1]), (11, [11]), (512, [11])):
        sizes.clear()
        result = PrefillExecutor(runner, chunk_size).execute(PROMPT, open_entry(runner, blocks))
        assert sizes == expected
        assert result.num_chunks == len(expected)


def test_decode_respects_max_tokens(setup) -> None:  # type: ignore[no-untyped-def]
    runner, blocks, _ = setup
    for max_tokens in (0, 1, 2, 9):
        entry = open_entry(runner, blocks)
        first = int(PrefillExecutor(runner).execute(PROMPT, entry).logits.argmax())
        tokens = DecodeExecutor(runner).generate(entry, first, max_tokens)
        assert len(tokens) == max_tokens
        assert entry.seq_len == len(PROMPT) + max(max_tokens - 1, 0)  # the last token is not in the cache
        blocks.release(entry.sequence_id)


def test_the_executors_give_the_tokens_of_the_engine(setup) -> None:  # type: ignore[no-untyped-def]
    runner, _, entry = setup
    first = int(PrefillExecutor(runner, 3).execute(PROMPT, entry).logits.argmax())
    tokens = DecodeExecutor(runner).generate(entry, first, 20)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    assert [tokens] == output_ids(run_alone(PROMPT, params))


def test_a_failed_pass_leaves_the_sequence_as_it_was(setup) -> None:  # type: ignore[no-untyped-def]
    """A bad token, then a good one: the good one stands where the bad one would have stood."""
    runner, blocks, entry = setup
    decode = DecodeExecutor(runner)
    first = int(PrefillExecutor(runner).execute(PROMPT, entry).logits.argmax())
    for bad in (61, -1, 10**9):
        with pytest.raises(TokenIdError, match="outside the vocabulary"):
            decode.step(entry, bad)
        assert entry.seq_len == len(PROMPT)
    with pytest.raises(TokenIdError, match="whole numbers"):
        decode.step(entry, 2.5)  # type: ignore[arg-type]
    second = decode.step(entry, first)
    whole = run_chunks(runner, open_entry(runner, blocks), [*PROMPT, first], 512)
    assert second == int(whole[-1].argmax())


def test_a_prompt_that_fails_half_way_leaves_nothing(setup, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    runner, blocks, entry = setup
    prefill = PrefillExecutor(runner, 4)
    honest, calls = ModelRunner.run, iter(range(100))

    def failing(self: ModelRunner, batch: Any) -> Any:
        if next(calls) == 1:
            raise FloatingPointError("the second chunk")
        return honest(self, batch)

    monkeypatch.setattr(ModelRunner, "run", failing)
    with pytest.raises(FloatingPointError):
        prefill.execute(PROMPT, entry)
    assert (entry.seq_len, blocks.num_used_blocks) == (0, 0)
    result = prefill.execute(PROMPT, entry)
    assert result.kv_len == len(PROMPT)


@pytest.mark.parametrize("chunk_size", [0, -1])
def test_chunks_have_at_least_one_token(setup, chunk_size: int) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match="chunk_size must be at least 1"):
        PrefillExecutor(setup[0], chunk_size)


def test_misuse_is_a_named_error(setup) -> None:  # type: ignore[no-untyped-def]
    runner, _, entry = setup
    with pytest.raises(EmptyPromptError):
        PrefillExecutor(runner).execute([], entry)
    with pytest.raises(PhaseError, match="decode before prefill"):
        DecodeExecutor(runner).step(entry, 3)
    with pytest.raises(OutOfBlocksError):
        PrefillExecutor(runner).execute([3] * 1000, entry)
