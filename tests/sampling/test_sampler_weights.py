"""The exact arithmetic under the sampler, against plain definitions, at sizes that take the fast paths."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_helpers import make_sampler, random_logits

from bifolio.sampling.history import History
from bifolio.sampling.sampler import prompt_logprobs
from bifolio.sampling.weights import ONE, draw, kth_bound, shift, sort_candidates, to_weights
from bifolio.sampling_params import SamplingParams

torch = pytest.importorskip("torch")

DEVICES = ["numpy", "cpu"] + (["cuda"] if torch.cuda.is_available() else [])


def place(values: np.ndarray, where: str) -> Any:
    return values if where == "numpy" else torch.from_numpy(values).to(where)


def host(values: Any) -> np.ndarray:
    return values if isinstance(values, np.ndarray) else values.cpu().numpy()


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("width", [1, 2, 255, 256, 2048, 2049, 4096, 5003])
def test_draw_inverts_the_running_sum(width: int, where: str) -> None:
    random = np.random.default_rng(width)
    weights = random.integers(0, ONE, (40, width)) * (random.random((40, width)) < 0.3)
    weights[:, random.integers(width)] = 5
    noise = np.concatenate([random.random(37), [0.0, 0.5, 1 - 2**-53]])
    found = host(draw(place(weights, where), noise))
    for row in range(40):
        running = [int(total) for total in np.cumsum(weights[row])]
        target = min(int(noise[row] * running[-1]), running[-1] - 1)
        expected = next(index for index, total in enumerate(running) if total > target)
        assert found[row] == expected
        assert weights[row, expected] > 0


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("width", [5, 500, 50_257])
def test_bound_of_the_largest(width: int, where: str) -> None:
    values = np.round(random_logits(6, width), 1)
    values[5, 3:] = -np.inf  # fewer finite values than asked for
    counts = np.minimum(np.array([1, 2, 40, 300, width, 4]), width)
    bound = host(kth_bound(place(values, where), counts))[:, 0]
    for row, count in enumerate(counts):
        exact = np.sort(values[row])[::-1][count - 1]
        assert bound[row] <= max(exact, -3.4028235e38)
        assert np.isfinite(bound[row])
    assert (values[0] >= bound[0]).sum() < 20 or width < 500


@pytest.mark.parametrize("where", DEVICES)
def test_candidates_are_sorted_by_value_and_id(where: str) -> None:
    values = np.round(random_logits(5, 1000), 0)
    values[0, 7], values[0, 9] = -0.0, 0.0
    mask = values > np.array([[-1.0], [2.0], [100.0], [0.0], [-100.0]])
    ids, found = (host(part) for part in sort_candidates(place(mask, where), place(values, where)))
    for row in range(5):
        chosen = np.flatnonzero(mask[row])
        order = chosen[np.lexsort((chosen, -values[row, chosen]))]
        np.testing.assert_array_equal(ids[row, : len(order)], order)
        np.testing.assert_array_equal(found[row, : len(order)], values[row, order])
        assert np.all(found[row, len(order) :] == -np.inf)


@pytest.mark.parametrize("where", DEVICES)
def test_large_vocabulary_top_k_and_top_p(where: str) -> None:
    """Against sorting the whole vocabulary, at a size where nothing is sorted whole."""
    vocab = 50_257
    logits = random_logits(4, vocab, scale=2.5)
    options = [{"top_k": 50}, {"top_k": 2000}, {"top_p": 0.7}, {"top_p": 0.95, "min_p": 0.001}]
    sampler = make_sampler([SamplingParams(**option) for option in options], vocab)
    found = host(sampler.probabilities(place(logits, where), np.arange(4)))
    exact = np.exp(logits.astype(np.float64))
    exact /= exact.sum(-1, keepdims=True)
    for row, option in enumerate(options):
        order = np.argsort(-exact[row], kind="stable")
        kept = order[: option.get("top_k", vocab)]
        before = np.cumsum(exact[row, kept]) - exact[row, kept]
        kept = kept[before < option.get("top_p", 2.0)]
        kept = kept[exact[row, kept] >= option.get("min_p", 0.0) * exact[row].max()]
        assert set(np.flatnonzero(found[row])) == set(kept)
        np.testing.assert_allclose(found[row, kept], exact[row, kept] / exact[row, kept].sum(), rtol=1e-5)
    tokens = sampler.sample(place(logits, where), np.arange(4), np.arange(4)).token_ids
    assert all(found[row, tokens[row]] > 0 for row in range(4))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_draws_what_the_cpu_draws() -> None:
    vocab, rows = 32_003, 64
    kinds = [{"temperature": 0}, {}, {"top_k": 40}, {"top_p": 0.9}, {"typical_p": 0.5}, {"repetition_penalty": 1.2}]
    sampler = make_sampler([SamplingParams(**kinds[i % len(kinds)], logprobs=2) for i in range(rows)], vocab)
    logits = random_logits(rows, vocab)
    on_cpu = sampler.sample(logits, np.arange(rows), np.arange(rows))
    on_gpu = sampler.sample(place(logits, "cuda"), np.arange(rows), np.arange(rows))
    assert (on_cpu.token_ids == on_gpu.token_ids).mean() > 0.98  # exp may differ in the last bit
    same = on_cpu.token_ids == on_gpu.token_ids
    np.testing.assert_allclose(on_cpu.logprobs[same], on_gpu.logprobs[same], atol=1e-5)
    for row in range(0, rows, 7):
        alone = sampler.sample(place(logits[row : row + 1], "cuda"), [row], [row])
        assert alone.token_ids[0] == on_gpu.token_ids[row]
        assert alone.logprobs[0] == on_gpu.logprobs[row]


@pytest.mark.full
@given(st.lists(st.floats(-50, 0, width=32), min_size=1, max_size=50))
@settings(max_examples=100, deadline=None)
def test_weights_are_probabilities(values: list[float]) -> None:
    shifted = shift(np.array([values], dtype=np.float32))
    weights = to_weights(shifted)
    assert weights.max() == ONE
    np.testing.assert_allclose(weights / ONE, np.exp(shifted.astype(np.float64)), rtol=1e-5, atol=2.0 / ONE)


def test_logprobs_of_a_large_vocabulary() -> None:
    logits = random_logits(30, 20_011, scale=5.0)
    ids = np.arange(30) * 7
    scored = prompt_logprobs(logits, ids, 20)
    expected = torch.from_numpy(logits).double().log_softmax(-1)
    np.testing.assert_allclose(scored.logprobs, expected[np.arange(30), ids], atol=1e-5)
    assert [[token for token, _ in row] for row in scored.top] == expected.topk(20).indices.tolist()


@pytest.mark.full
@given(
    changes=st.lists(
        st.one_of(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.integers(0, 6), st.none()), max_size=12
    ),
    pending=st.lists(st.integers(0, 9), max_size=3),
)
@settings(max_examples=200, deadline=None)
def test_history_follows_its_list(changes: list[Any], pending: list[int]) -> None:
    """Appends, rollbacks and exchanged tokens, looked at after each."""
    prompt, output = [3, 3, 7], [1]
    history = History(prompt, output, 10)
    for change in changes:
        if isinstance(change, list):
            output.extend(change)
        elif change is None:
            output[:] = [9 - token for token in output]
            history.restart()
        else:
            del output[max(0, len(output) - change) :]
        said = output + pending
        ids, counts = history.output_counts(pending)
        assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == {t: said.count(t) for t in set(said)}
        assert history.tokens(pending).tolist() == prompt + said
        assert history.seen(pending).tolist() == sorted({*prompt, *said})
