"""The sampler's own promises: fair draws, rows that do not know their neighbours, and no input that crashes it.

What a request may do to its logits before a token is drawn is in `test_sampler_edits.py`.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sampling_helpers import CROWD, EOS, VOCAB, crowd, make_sampler, random_logits

from bifolio.errors import ModelOutputError
from bifolio.sampling.sampler import Sampler, SamplingTable, uniform
from bifolio.sampling.weights import STREAM_XTC, child_seed
from bifolio.sampling_params import SamplingParams

torch = pytest.importorskip("torch")


# ---- fair draws ----------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 8},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"typical_p": 0.7},
        {"top_k": 20, "top_p": 0.9, "min_p": 0.02, "temperature": 1.4},
        {"xtc_probability": 1.0},
        {"repetition_penalty": 1.3, "presence_penalty": 0.4},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
@pytest.mark.parametrize("vary", ["seed", "position"])
def test_drawn_frequencies(options: dict[str, Any], vary: str) -> None:
    """Chi-square of 20,000 draws against the distribution that `probabilities` claims (shown right elsewhere)."""
    from scipy import stats  # two seconds, so not at the top

    draws, vocab = 20_000, 30
    logits = random_logits(1, vocab, seed=3, scale=1.5)
    sampler = make_sampler([SamplingParams(**options)], vocab, [[1, 2, 3]], [[4, 5, 4]])
    tokens = np.empty(draws, dtype=np.int32)
    for start in range(0, draws, 1000):
        if vary == "seed":
            sampler.table.seed[0] = start * 977
        part = np.arange(start, start + 1000)
        tokens[part] = sampler.sample(np.repeat(logits, 1000, 0), np.zeros(1000), part).token_ids
    expected = sampler.probabilities(logits, [0], [0])[0].astype(np.float64)
    counts = np.bincount(tokens, minlength=vocab)
    assert counts[expected == 0].sum() == 0
    possible = expected * draws >= 5
    observed = np.append(counts[possible], counts[~possible].sum())
    wanted = np.append(expected[possible], expected[~possible].sum()) * draws
    if wanted[-1] < 1:
        observed, wanted = observed[:-1], wanted[:-1]
    result = stats.chisquare(observed, wanted * (observed.sum() / wanted.sum()))
    assert result.pvalue > 1e-4


@pytest.mark.full
def test_noise_is_uniform_and_depends_on_every_key() -> None:
    from scipy import stats

    positions = np.arange(50_000)
    streams = [uniform(5, positions), uniform(6, positions), uniform(5, positions, STREAM_XTC)]
    streams.append(uniform(np.arange(50_000), 17))
    for noise in streams:
        assert noise.min() >= 0.0
        assert noise.max() < 1.0
        assert stats.kstest(noise, "uniform").pvalue > 1e-3
        assert abs(np.corrcoef(noise[:-1], noise[1:])[0, 1]) < 0.02
    for first, second in [(0, 1), (0, 2), (1, 2), (0, 3)]:
        assert abs(np.corrcoef(streams[first], streams[second])[0, 1]) < 0.02
    assert uniform(5, 10)[0] == streams[0][10]
    assert uniform(-1, 3)[0] == uniform((1 << 64) - 1, 3)[0]


def test_children_of_a_request_have_their_own_seeds() -> None:
    assert child_seed(42, 0) == 42
    seeds = {child_seed(42, index) for index in range(1000)} | {child_seed(43, index) for index in range(1000)}
    assert len(seeds) == 2000
    assert all(0 <= seed < 1 << 64 for seed in seeds)


def test_xtc_excludes_the_favourites_as_often_as_asked() -> None:
    vocab, draws = 10, 4000
    logits = np.log(np.array([[0.4, 0.3, 0.2, 0.05, 0.05] + [1e-9] * 5], dtype=np.float32))
    params = SamplingParams(xtc_probability=0.3, xtc_threshold=0.1)
    sampler = make_sampler([params], vocab)
    slots, positions = np.zeros(draws, dtype=np.int64), np.arange(draws)
    tokens = sampler.sample(np.repeat(logits, draws, 0), slots, positions).token_ids
    applies = uniform(1000, positions, STREAM_XTC) < 0.3
    assert abs(applies.mean() - 0.3) < 0.03
    assert set(tokens[applies]) <= {2, 3, 4}
    assert set(tokens[~applies]) == {0, 1, 2, 3, 4}
    alone = make_sampler([SamplingParams(xtc_probability=1.0, xtc_threshold=0.35)], vocab)
    assert alone.probabilities(logits, [0], [0])[0, 0] == pytest.approx(0.4, abs=1e-5)  # one favourite stays


# ---- neighbours, namespaces -----------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("use_torch", [False, True], ids=["numpy", "torch"])
@pytest.mark.parametrize("vocab", [VOCAB, 4099])
def test_a_row_does_not_depend_on_its_neighbours(use_torch: bool, vocab: int) -> None:
    """Bit for bit: each row alone, in the whole crowd, and in random parts of it."""
    count = 2 * len(CROWD)
    params, prompts, outputs = crowd(count)
    sampler = make_sampler(params, vocab, prompts, outputs, EOS)
    logits: Any = random_logits(count, vocab, seed=1)
    if use_torch:
        logits = torch.from_numpy(logits)
    slots, positions = np.arange(count), np.arange(count) + 50
    whole = sampler.sample(logits, slots, positions)
    distributions = np.asarray(sampler.probabilities(logits, slots, positions))
    random = np.random.default_rng(0)
    parts = [np.array([i]) for i in range(count)] + [
        random.permutation(count)[: random.integers(2, count)] for _ in range(8)
    ]
    for part in parts:
        result = sampler.sample(logits[part, :], slots[part], positions[part])
        np.testing.assert_array_equal(result.token_ids, whole.token_ids[part])
        np.testing.assert_array_equal(result.logprobs.view(np.int32), whole.logprobs[part].view(np.int32))
        np.testing.assert_array_equal(result.ranks, whole.ranks[part])
        assert result.top == [whole.top[i] for i in part]
        found = np.asarray(sampler.probabilities(logits[part, :], slots[part], positions[part]))
        np.testing.assert_array_equal(found.view(np.int32), distributions[part].view(np.int32))


def test_numpy_and_torch_agree() -> None:
    count = 10 * len(CROWD)
    params, prompts, outputs = crowd(count)
    sampler = make_sampler(params, VOCAB, prompts, outputs, EOS)
    logits = random_logits(count, VOCAB, seed=2)
    slots, positions = np.arange(count), np.arange(count)
    ours = sampler.sample(logits, slots, positions)
    theirs = sampler.sample(torch.from_numpy(logits), torch.from_numpy(slots), torch.from_numpy(positions))
    np.testing.assert_array_equal(ours.token_ids, theirs.token_ids)
    np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-5)
    np.testing.assert_array_equal(ours.ranks, theirs.ranks)
    np.testing.assert_allclose(
        sampler.probabilities(logits, slots), sampler.probabilities(torch.from_numpy(logits), slots).numpy(), atol=1e-6
    )


def test_half_precision_logits() -> None:
    logits = torch.from_numpy(random_logits(2, VOCAB)).to(torch.bfloat16)
    sampler = make_sampler([SamplingParams(temperature=0), SamplingParams(top_p=0.9, logprobs=2)], VOCAB)
    result = sampler.sample(logits, [0, 1], [5, 5])
    again = sampler.sample(logits.float().numpy(), [0, 1], [5, 5])
    np.testing.assert_array_equal(result.token_ids, again.token_ids)


def test_logits_are_not_changed() -> None:
    params, prompts, outputs = crowd(len(CROWD))
    sampler = make_sampler(params, VOCAB, prompts, outputs, EOS)
    logits = random_logits(len(CROWD), VOCAB)
    before = logits.copy()
    sampler.sample(logits, np.arange(len(CROWD)), np.arange(len(CROWD)))
    sampler.probabilities(logits, np.arange(len(CROWD)))
    np.testing.assert_array_equal(logits, before)


@pytest.mark.full
def test_torch_is_not_imported_for_numpy() -> None:
    code = (
        "import sys, numpy as np\n"
        "from bifolio.sampling.sampler import Sampler, SamplingTable\n"
        "from bifolio.sampling_params import SamplingParams\n"
        "table = SamplingTable(1, 9); table.set(0, SamplingParams(top_p=0.9, logprobs=2), 1, [1], [])\n"
        "Sampler(9, table).sample(np.zeros((1, 9), np.float32), [0], [1])\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_seed_and_position_decide() -> None:
    """The same row again gives the same token; other positions and seeds give others."""
    table = SamplingTable(3, VOCAB)
    for slot, seed in enumerate([1, 1, 2]):
        table.set(slot, SamplingParams(temperature=2.0), seed, [1], [])
    sampler = Sampler(VOCAB, table)
    logits = np.repeat(random_logits(1, VOCAB, scale=0.5), 40, 0)
    first, second, third = (sampler.sample(logits, np.full(40, s), np.arange(40)).token_ids for s in range(3))
    np.testing.assert_array_equal(first, second)
    assert (first != third).mean() > 0.8
    assert len(set(first)) > 20


# ---- odd numbers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_torch", [False, True], ids=["numpy", "torch"])
@pytest.mark.parametrize("options", [{"temperature": 0}, {}, {"top_k": 2}, {"top_p": 0.9}, {"typical_p": 0.9}])
def test_broken_logits_are_well_defined(options: dict[str, Any], use_torch: bool) -> None:
    nan, inf = float("nan"), float("inf")
    rows = [
        ([nan, 1.0, nan, -inf], {1}),  # NaN is excluded
        ([nan, inf, 3.0, -inf], {1}),  # +inf beats everything
        ([inf, 0.0, inf, nan], {0, 2}),
        ([-inf, -inf, -3e38, -inf], {2}),
        ([3.4e38, -3.4e38, 0.0, 1.0], {0}),
        ([-0.0, -inf, 0.0, -inf], {0, 2}),
        ([nan, nan, nan, nan], None),
        ([-inf, -inf, -inf, -inf], None),
        ([0.0, -60.0, -60.0, -inf], {0}),
    ]
    logits: Any = np.array([values for values, _ in rows], dtype=np.float32)
    if use_torch:
        logits = torch.from_numpy(logits)
    sampler = make_sampler([SamplingParams(**options, logprobs=2)] * len(rows), 4)
    for position in range(20):
        result = sampler.sample(logits, np.arange(len(rows)), np.full(len(rows), position))
        for row, (_, possible) in enumerate(rows):
            if possible is None:
                assert result.token_ids[row] == -1
                assert isinstance(result.errors[row], ModelOutputError)
            else:
                assert int(result.token_ids[row]) in possible
                assert row not in result.errors
    distributions = np.asarray(sampler.probabilities(logits, np.arange(len(rows))))
    sums = [0.0 if possible is None else 1.0 for _, possible in rows]
    np.testing.assert_allclose(distributions.sum(-1), sums, atol=1e-6)


@pytest.mark.parametrize("temperature", [1e-300, 1e-45, 1e-8, 1e-3])
def test_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = random_logits(50, VOCAB, scale=50.0)
    sampler = make_sampler([SamplingParams(temperature=temperature)] * 50, VOCAB)
    result = sampler.sample(logits, np.arange(50), np.arange(50))
    np.testing.assert_array_equal(result.token_ids, logits.argmax(-1))


def test_huge_temperature_is_uniform() -> None:
    sampler = make_sampler([SamplingParams(temperature=1e29)], 8)
    found = sampler.probabilities(random_logits(1, 8), [0])
    np.testing.assert_allclose(found, 1 / 8, atol=1e-6)


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = np.zeros((1, VOCAB), dtype=np.float32)
    logits[0, [7, 100, 200]] = 5.0
    sampler = make_sampler([SamplingParams(temperature=0)], VOCAB)
    assert sampler.sample(logits, [0], [0]).token_ids[0] == 7
    assert sampler.sample(torch.from_numpy(logits), [0], [0]).token_ids[0] == 7
    assert sampler.probabilities(logits, [0])[0, 7] == 1.0


def test_top_p_keeps_the_lowest_ids_of_equals() -> None:
    sampler = make_sampler([SamplingParams(top_p=0.5)], 10)
    assert np.flatnonzero(sampler.probabilities(np.zeros((1, 10), np.float32), [0])[0]).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.full
@given(
    values=st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), min_size=1, max_size=20),
    options=st.sampled_from(CROWD[:13]),
    position=st.integers(0, 1 << 40),
)
@example(values=[-2.2685491804142884e38], options={"temperature": 0.0, "repetition_penalty": 1.5}, position=0)
@settings(max_examples=400, deadline=None)
def test_any_logits_give_a_token_or_an_error(values: list[float], options: dict[str, Any], position: int) -> None:
    sampler = make_sampler([SamplingParams(**options)], len(values))
    logits = np.array([values], dtype=np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        result = sampler.sample(logits, [0], [position])
    token = int(result.token_ids[0])
    if token == -1:
        assert not np.any(logits > -np.inf)
        assert 0 in result.errors
    else:
        assert logits[0, token] > -np.inf


def test_one_token_vocabulary_and_large_top_k() -> None:
    sampler = make_sampler([SamplingParams(top_k=10**15), SamplingParams(top_k=1, top_p=0.01)], 1)
    assert sampler.sample(np.zeros((2, 1), np.float32), [0, 1], [0, 0]).token_ids.tolist() == [0, 0]


def test_an_empty_batch() -> None:
    sampler = make_sampler([SamplingParams()], VOCAB)
    assert len(sampler.sample(np.zeros((0, VOCAB), np.float32), [], []).token_ids) == 0


# ---- logprobs ------------------------------------------------------------------------------------------------------


def test_logprobs_are_the_models_own() -> None:
    """Before temperature, penalties and filters, as documented."""
    params = SamplingParams(temperature=0.5, top_k=3, logit_bias={9: 50.0}, logprobs=4)
    sampler = make_sampler([params, SamplingParams(logprobs=0), SamplingParams()], VOCAB)
    logits = random_logits(3, VOCAB)
    result = sampler.sample(logits, [0, 1, 2], [1, 1, 1])
    expected = torch.from_numpy(logits).log_softmax(-1).numpy()
    assert result.token_ids[0] == 9
    for row in (0, 1):
        token = result.token_ids[row]
        assert result.logprobs[row] == pytest.approx(expected[row, token], abs=1e-5)
        assert result.ranks[row] == 1 + (expected[row] > expected[row, token]).sum()
    assert [token for token, _ in result.top[0] or []] == np.argsort(-expected[0])[:4].tolist()
    assert result.top[1:] == [[], None]
    assert np.isnan(result.logprobs[2])


def test_logprobs_of_the_whole_vocabulary_and_of_ties() -> None:
    logits = np.zeros((1, 7), dtype=np.float32)
    sampler = make_sampler([SamplingParams(temperature=0, logprobs=20)], 7)
    result = sampler.sample(logits, [0], [0])
    assert [token for token, _ in result.top[0] or []] == list(range(7))
    assert result.logprobs[0] == pytest.approx(-np.log(7), abs=1e-6)
    assert result.ranks[0] == 1
