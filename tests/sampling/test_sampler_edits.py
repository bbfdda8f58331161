"""What a request may do to its logits: penalties, drafts counted in, processors, masks, bans; and who is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_helpers import CROWD, EOS, VOCAB, make_sampler, random_logits

from bifolio.errors import RequestError, TokenIdError
from bifolio.sampling.sampler import SamplingTable
from bifolio.sampling_params import SamplingParams

torch = pytest.importorskip("torch")


def test_presence_and_frequency_penalties_count_the_output() -> None:
    params = SamplingParams(presence_penalty=0.7, frequency_penalty=0.3)
    output = [3, 3, 3, 5]
    sampler = make_sampler([params], 8, [[1, 1, 6]], [output])
    logits = random_logits(1, 8)
    for _ in range(3):
        counts = np.bincount(output, minlength=8)
        expected = torch.from_numpy(logits - 0.3 * counts - 0.7 * (counts > 0)).softmax(-1)
        np.testing.assert_allclose(sampler.probabilities(logits, [0]), expected, atol=1e-6)
        output.append(1)  # the table follows the list
    del output[2:]  # a rollback
    counts = np.bincount(output, minlength=8)
    expected = torch.from_numpy(logits - 0.3 * counts - 0.7 * (counts > 0)).softmax(-1)
    np.testing.assert_allclose(sampler.probabilities(logits, [0]), expected, atol=1e-6)


@pytest.mark.parametrize("options", [options for options in CROWD if options])
def test_pending_tokens_count_as_output(options: dict[str, Any]) -> None:
    """Rows for drafted tokens see the drafts before them as if they had been appended."""
    params = SamplingParams(**options)
    random = np.random.default_rng(3)
    output, drafts = random.integers(0, 9, 20).tolist(), random.integers(0, 9, 4).tolist()
    sampler = make_sampler([params], VOCAB, [[1, 2, 3]], [output], EOS)
    logits = random_logits(5, VOCAB)
    pending = [drafts[:i] for i in range(5)]
    positions = np.arange(23, 28)
    found = sampler.probabilities(logits, np.zeros(5, np.int64), positions, pending)
    tokens = sampler.sample(logits, np.zeros(5, np.int64), positions, pending).token_ids
    for row in range(5):
        alone = sampler.probabilities(logits[row : row + 1], [0], positions[row : row + 1])
        np.testing.assert_array_equal(found[row], alone[0])
        assert sampler.sample(logits[row : row + 1], [0], positions[row : row + 1]).token_ids[0] == tokens[row]
        output.extend(drafts[row : row + 1])


def slow_dry(tokens: list[int], breakers: set[int], multiplier: float, base: float, allowed: int) -> dict[int, float]:
    """DRY as its author describes it, token by token."""
    longest: dict[int, int] = {}
    if not tokens or tokens[-1] in breakers:
        return {}
    for place in range(len(tokens) - 1):
        if tokens[place] != tokens[-1] or tokens[place + 1] in breakers:
            continue
        length = 1
        while place - length >= 0 and tokens[place - length] == tokens[-1 - length]:
            if tokens[-1 - length] in breakers:
                break
            length += 1
        longest[tokens[place + 1]] = max(length, longest.get(tokens[place + 1], 0))
    return {token: multiplier * base ** (n - allowed) for token, n in longest.items() if n >= allowed}


@pytest.mark.full
@given(
    tokens=st.lists(st.integers(0, 4), min_size=1, max_size=40),
    breakers=st.sets(st.integers(0, 4), max_size=2),
    allowed=st.integers(1, 4),
    window=st.sampled_from([0, 1, 5, 20]),
)
@settings(max_examples=200, deadline=None)
def test_dry(tokens: list[int], breakers: set[int], allowed: int, window: int) -> None:
    params = SamplingParams(
        dry_multiplier=0.8,
        dry_base=1.1,
        dry_allowed_length=allowed,
        dry_sequence_breakers=tuple(breakers),
        dry_range=window,
    )
    half = len(tokens) // 2
    sampler = make_sampler([params], 6, [tokens[:half]], [tokens[half:]])
    logits = random_logits(1, 6)
    expected = logits.astype(np.float64)
    for token, penalty in slow_dry(tokens[-window:] if window else tokens, breakers, 0.8, 1.1, allowed).items():
        expected[0, token] -= penalty
    found = sampler.process_logits(logits, [0])
    np.testing.assert_allclose(found, expected - expected.max(), atol=1e-4)


def test_long_repetitions_stay_finite() -> None:
    params = SamplingParams(dry_multiplier=5.0, dry_base=50.0, dry_sequence_breakers=())
    sampler = make_sampler([params], 6, [[1] * 3000], [[1] * 3000])
    assert sampler.sample(np.zeros((1, 6), np.float32), [0], [0]).token_ids[0] != 1


def test_users_processors_see_history_and_change_logits() -> None:
    seen: list[Any] = []

    def two(output: list[int], logits: Any) -> Any:
        seen.append(list(output))
        logits[5] += 100.0
        return logits

    def three(prompt: list[int], output: list[int], logits: Any) -> Any:
        seen.append((list(prompt), list(output)))
        return logits + 0.0

    output = [3, 4]
    for given_logits in (random_logits(1, 9), torch.from_numpy(random_logits(1, 9))):
        seen.clear()
        sampler = make_sampler([SamplingParams(temperature=0, logits_processors=[two, three])], 9, [[1, 2]], [output])
        assert sampler.sample(given_logits, [0], [4]).token_ids[0] == 5
        assert seen == [[3, 4], ([1, 2], [3, 4])]


@pytest.mark.parametrize(
    "processor",
    [
        lambda output, logits: 1 / 0,
        lambda output, logits: logits[:-1],
        lambda output, logits: None,
        lambda output, logits: "x",
        lambda output, logits: logits * float("nan"),
    ],
    ids=["raises", "shape", "none", "text", "nan"],
)
def test_a_failing_processor_fails_its_request_alone(processor: Any) -> None:
    good, bad = SamplingParams(temperature=0), SamplingParams(temperature=0, logits_processors=[processor])
    sampler = make_sampler([good, bad, good], VOCAB)
    logits = random_logits(3, VOCAB)
    result = sampler.sample(logits, [0, 1, 2], [0, 0, 0])
    assert set(result.errors) == {1}
    np.testing.assert_array_equal(result.token_ids[[0, 2]], logits.argmax(-1)[[0, 2]])
    assert result.token_ids[1] == -1


class EvenTokens:
    """Allows even ids, or nothing after three pending tokens; as booleans or as bits."""

    def __init__(self, packed: bool) -> None:
        self.packed = packed

    def allowed(self, pending: Any) -> np.ndarray:
        mask = np.arange(VOCAB) % 2 == 0 if len(pending) < 3 else np.zeros(VOCAB, bool)
        if not self.packed:
            return mask
        return np.packbits(np.pad(mask, (0, -VOCAB % 32)), bitorder="little").view(np.uint32)

    def restart(self) -> None: ...


@pytest.mark.parametrize("packed", [False, True])
def test_token_masks(packed: bool) -> None:
    params = SamplingParams(allowed_token_ids=[1, 2, 3, 4, 300])
    sampler = make_sampler([params], VOCAB, mask=EvenTokens(packed))
    found = sampler.probabilities(random_logits(1, VOCAB), [0])
    assert set(np.flatnonzero(found[0]).tolist()) == {2, 4, 300}
    result = sampler.sample(random_logits(1, VOCAB), [0], [0], [[1, 1, 1]])
    assert 0 in result.errors


def test_min_tokens_bans_every_end() -> None:
    logits = np.zeros((1, 9), dtype=np.float32)
    output: list[int] = []
    params = SamplingParams(min_tokens=2, stop_token_ids=[7])
    sampler = make_sampler([params], 9, [[1]], [output], EOS)
    for length in range(4):
        possible = set(np.flatnonzero(sampler.probabilities(logits, [0])[0]).tolist())
        assert possible == set(range(9)) - ({2, 7} if length < 2 else set())
        output.append(1)


def test_a_cleared_slot_forgets_its_parameters() -> None:
    sampler = make_sampler([SamplingParams(allowed_token_ids=[3], logprobs=1)], VOCAB)
    sampler.table.clear(0)
    sampler.table.set(0, SamplingParams(temperature=0), 1, [1], [])
    logits = random_logits(1, VOCAB)
    result = sampler.sample(logits, [0], [0])
    assert result.token_ids[0] == logits.argmax()
    assert np.isnan(result.logprobs[0])
    assert result.top == [None]


def test_the_table_refuses_what_does_not_fit_the_model() -> None:
    table = SamplingTable(1, 10)
    for params in (
        SamplingParams(logit_bias={10: 1.0}),
        SamplingParams(allowed_token_ids=[12]),
        SamplingParams(stop_token_ids=[10]),
        SamplingParams(bad_words_token_ids=[[1, 11]]),
    ):
        with pytest.raises(TokenIdError, match="vocabulary"):
            table.set(0, params, 0, [1], [])
    with pytest.raises(TokenIdError):
        table.set(0, SamplingParams(), 0, [10], [])
    for params in (
        SamplingParams(bad_words=["x"]),
        SamplingParams(dry_multiplier=1.0),
        SamplingParams(logits_processors=[lambda: None]),
    ):
        with pytest.raises(RequestError):
            table.set(0, params, 0, [1], [])
