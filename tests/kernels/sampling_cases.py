"""Random rows of logits with options, drawn by a device kernel and by the host: both must give the same outcome."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from bifolio.kernels.triton.device_state import DeviceState
from bifolio.kernels.triton.logprobs import read_scores
from bifolio.kernels.triton.sampling import Mode, Results, choose_tokens
from bifolio.sampling.logprobs import finish_scores
from bifolio.sampling.sampler import SampledTokens, Sampler, SamplingTable
from bifolio.sampling_params import SamplingParams

OPTIONS: dict[str, dict[str, list[Any]]] = {  # each row draws one value of each
    "plain": {"temperature": [0.3, 0.8, 1.0, 3.0, 1e-30]},
    "top-k": {"temperature": [0.5, 1.0], "top_k": [1, 2, 5, 40, 300]},
    "top-p": {"temperature": [0.3, 0.8, 1.0, 3.0], "top_p": [0.01, 0.5, 0.9, 0.95, 0.999]},
    "min-p": {"temperature": [0.8, 1.5], "min_p": [1e-6, 0.05, 0.5, 1.0]},
    "logprobs": {"temperature": [0.0, 1.0, 2.0], "logprobs": [None, 0, 1, 5, 20], "top_p": [1.0, 0.7]},
    "all": {"temperature": [0.0, 0.8, 2.0], "top_k": [0, 20, 300], "top_p": [1.0, 0.8, 0.95], "min_p": [0.0, 0.02]},
}
KINDS = ("flat", "normal", "peaked", "ties", "excluded", "odd")


def random_logits(kind: str, num_rows: int, vocab: int, rng: np.random.Generator) -> np.ndarray:
    """f32[num_rows, vocab]"""
    spread = {"flat": 0.01, "peaked": 8.0}.get(kind, 1.5)
    logits = rng.normal(0, spread, (num_rows, vocab)).astype(np.float32)
    if kind == "ties":
        logits = np.round(logits * 2) / 2  # includes -0.0 beside 0.0
    if kind == "excluded":
        logits[:, rng.random(vocab) < 0.7] = -np.inf
        logits[0] = -np.inf
    if kind == "odd":
        logits[rng.random(logits.shape) < 0.01] = np.nan
        logits[-1, : vocab // 3] = np.inf
    return logits


def random_params(options: str, num_rows: int, rng: np.random.Generator) -> list[SamplingParams]:
    choices = OPTIONS[options]
    return [
        SamplingParams(**{name: of[int(rng.integers(len(of)))] for name, of in choices.items()})
        for _ in range(num_rows)
    ]


def on_device(
    logits: np.ndarray,
    params: list[SamplingParams],
    seeds: np.ndarray,
    positions: np.ndarray,
    device: str,
    **sizes: int,
) -> SampledTokens:
    """The outcome of the kernels."""
    num_rows, vocab = logits.shape
    state = DeviceState(num_rows, 4, device)
    for slot, options in enumerate(params):
        top_k = options.top_k if 0 < options.top_k < vocab else 0
        temperature = 0.0 if options.is_greedy else options.temperature
        state.set_sampling(slot, temperature, int(seeds[slot]), top_k, options.top_p, options.min_p)
        state.set_logprobs(slot, options.logprobs)
    state.set_lengths(np.arange(num_rows), positions - 1)
    state.send()
    mode = Mode.of(
        any(options.temperature > 0 for options in params),
        any(options.filters_tokens(vocab) for options in params),
        any(options.needs_logprobs for options in params),
    )
    results = Results.new(1, num_rows, mode, pinned=device != "cpu")
    rows = torch.arange(num_rows, dtype=torch.int32, device=device)
    turn = torch.zeros(1, dtype=torch.int32, device=device)
    choose_tokens(torch.from_numpy(logits).to(device), rows, state, turn, results, mode, **sizes)
    if device != "cpu":
        torch.cuda.synchronize()
    outcome = SampledTokens.unknown(num_rows)
    outcome.token_ids = results.chosen[0].numpy().copy()
    assert np.array_equal(state.lengths.cpu().numpy(), positions), "every slot advances by its token"
    assert np.array_equal(state.tokens.cpu().numpy(), outcome.token_ids)
    if results.scores is not None:
        wanted = np.array([-1 if options.logprobs is None else options.logprobs for options in params])
        found = finish_scores(read_scores(results.scores[0].numpy()), wanted)
        for row in np.flatnonzero((wanted >= 0) & (outcome.token_ids >= 0)).tolist():
            outcome.logprobs[row], outcome.ranks[row] = found.logprobs[row], found.ranks[row]
            outcome.top[row] = found.top[row]
    return outcome


def on_host(logits: Any, params: list[SamplingParams], seeds: np.ndarray, positions: np.ndarray) -> SampledTokens:
    """The outcome of the definition, for numpy arrays or torch tensors."""
    table = SamplingTable(len(params), logits.shape[1])
    for slot, options in enumerate(params):
        table.set(slot, options, int(seeds[slot]), [0], [])
    return Sampler(logits.shape[1], table).sample(logits, np.arange(len(params)), positions)


def differences(found: SampledTokens, expected: SampledTokens) -> list[int]:
    """The rows in which two outcomes differ; logprobs are compared bit for bit."""
    same = (found.token_ids == expected.token_ids) & (found.ranks == expected.ranks)
    same &= found.logprobs.view(np.int32) == expected.logprobs.view(np.int32)
    return [row for row in range(len(same)) if not same[row] or found.top[row] != expected.top[row]]


def random_row_args(num_rows: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """(seeds, positions)"""
    return rng.integers(0, 1 << 63, num_rows), rng.integers(1, 100_000, num_rows)
