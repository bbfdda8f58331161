"""Random rows of logits with options, drawn by a device kernel and by the host: both must give the same outcome."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bifolio.kernels.logit_edits import LogitEdits
from bifolio.kernels.triton.device_state import DeviceState
from bifolio.kernels.triton.edits import SlotEdits
from bifolio.kernels.triton.logprobs import read_scores
from bifolio.kernels.triton.sampling import Mode, Results, choose_tokens
from bifolio.sampling.edits import device_edits
from bifolio.sampling.joint_masks import JointMasks
from bifolio.sampling.logprobs import finish_scores
from bifolio.sampling.sampler import SampledTokens, Sampler, SamplingTable
from bifolio.sampling_params import SamplingParams

OPTIONS: dict[str, dict[str, list[Any]]] = {  # each row draws one value of each
    "plain": {"temperature": [0.3, 0.8, 1.0, 3.0, 1e-30]},
    "top-k": {"temperature": [0.5, 1.0], "top_k": [1, 2, 5, 40, 300]},
    "top-p": {"temperature": [0.3, 0.8, 1.0, 3.0], "top_p": [0.01, 0.5, 0.9, 0.95, 0.999]},
    "min-p": {"temperature": [0.8, 1.5], "min_p": [1e-6, 0.05, 0.5, 1.0]},
    "logprobs": {"temperature": [0.0, 1.0, 2.0], "logprobs": [None, 0, 1, 5, 20], "top_p": [1.0, 0.7]},
    "penalties": {
        "temperature": [0.0, 0.8],
        "repetition_penalty": [1.0, 1.3, 0.7, 1e30],
        "presence_penalty": [0.0, 0.5],
        "frequency_penalty": [0.0, 0.3, -0.2],
        "top_p": [1.0, 0.9],
    },
    "bias": {
        "temperature": [0.0, 1.0],
        "logit_bias": [None, {3: 4.0, 20: -100.0, 7: 1.5}],
        "allowed_token_ids": [None, (1, 2, 3, 20, 30)],
        "bad_words_token_ids": [(), ((5,), (3,))],
        "top_k": [0, 3],
    },
    "min-tokens": {
        "temperature": [0.0, 1.0],
        "min_tokens": [0, 5, 12],
        "stop_token_ids": [(4,), tuple(range(2, 16, 2))],
    },
    "mask": {"temperature": [0.0, 1.0], "min_p": [0.0, 0.1]},
    "edits": {
        "temperature": [0.0, 0.9],
        "top_k": [0, 12],
        "logprobs": [None, 0, 3],
        "repetition_penalty": [1.0, 1.1],
        "frequency_penalty": [0.0, 0.3],
        "logit_bias": [None, {2: 1.0, 21: -3.0}],
        "bad_words_token_ids": [(), ((9,),)],
        "min_tokens": [0, 8],
    },
    "typical": {"temperature": [0.3, 1.0, 3.0], "typical_p": [1e-3, 0.2, 0.5, 0.9, 0.999], "top_k": [0, 30]},
    "xtc": {"temperature": [0.3, 1.0], "xtc_probability": [0.5, 1.0], "xtc_threshold": [1e-4, 0.02, 0.1, 0.5, 1.0]},
    "rare": {
        "temperature": [0.0, 0.8, 2.0],
        "top_k": [0, 20],
        "top_p": [1.0, 0.7, 0.95],
        "min_p": [0.0, 0.02],
        "typical_p": [1.0, 0.3, 0.9],
        "xtc_probability": [0.0, 0.5, 1.0],
        "xtc_threshold": [0.01, 0.1],
        "logprobs": [None, 2],
    },
    "all": {"temperature": [0.0, 0.8, 2.0], "top_k": [0, 20, 300], "top_p": [1.0, 0.8, 0.95], "min_p": [0.0, 0.02]},
}
EDITS = ("penalties", "bias", "min-tokens", "mask", "edits")
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
        logits[:, ::5] = -1e20  # times a large penalty it is no float
        logits[-1, : vocab // 3] = np.inf
    return logits


@dataclass(slots=True)
class Rows:
    """The options and the history of each row."""

    params: list[SamplingParams]
    seeds: np.ndarray
    positions: np.ndarray  # of the tokens to be drawn
    prompts: list[list[int]]
    outputs: list[list[int]]
    masks: list[FixedMask | None]

    def table(self, vocab: int) -> SamplingTable:
        table = SamplingTable(len(self.params), vocab)
        for slot, options in enumerate(self.params):
            prompt, output, ends = self.prompts[slot], self.outputs[slot], frozenset({1})
            table.set(slot, options, int(self.seeds[slot]), prompt, output, ends, self.masks[slot])
        return table

    def part(self, start: int, stop: int) -> Rows:
        return Rows(*(getattr(self, name)[start:stop] for name in self.__slots__))


@dataclass(slots=True)
class FixedMask:
    """Implements `TokenMask`: the same tokens whatever came before."""

    mask: np.ndarray

    def allowed(self, pending: Sequence[int]) -> np.ndarray:
        return self.mask

    def restart(self) -> None: ...


def random_rows(options: str, num_rows: int, vocab: int, rng: np.random.Generator) -> Rows:
    choices, is_edited = OPTIONS[options], options in EDITS
    params = [
        SamplingParams(**{name: of[int(rng.integers(len(of)))] for name, of in choices.items()})
        for _ in range(num_rows)
    ]
    prompts = [rng.integers(0, vocab, int(rng.integers(1, 20))).tolist() for _ in range(num_rows)]
    outputs = [rng.integers(0, min(vocab, 40), int(rng.integers(0, 20))).tolist() for _ in range(num_rows)]
    lengths = np.array([len(prompt) + len(output) for prompt, output in zip(prompts, outputs, strict=True)])
    has_mask = rng.random(num_rows) < {"mask": 1.0, "edits": 0.3}.get(options, 0.0)
    return Rows(
        params,
        rng.integers(0, 1 << 63, num_rows),
        lengths if is_edited else rng.integers(1, 100_000, num_rows),
        prompts,
        outputs,
        [_random_mask(vocab, rng) if has else None for has in has_mask],
    )


def _random_mask(vocab: int, rng: np.random.Generator) -> FixedMask:
    """Booleans or bits; some end before the vocabulary does, some behind it."""
    mask = rng.random(int(rng.choice([vocab, vocab + 70, vocab - 20]))) < rng.choice([0.02, 0.5])
    return FixedMask(mask if rng.random() < 0.5 else np.packbits(mask, bitorder="little"))


def on_device(logits: np.ndarray, rows: Rows, device: str, **sizes: int) -> SampledTokens:
    """The outcome of the kernels."""
    num_rows, vocab = logits.shape
    table, params = rows.table(vocab), rows.params
    state = DeviceState(num_rows, 4, device)
    edits = SlotEdits(state, vocab)
    own_edits = [_edits_of(table, slot) for slot in range(num_rows)]
    for slot, options in enumerate(params):
        top_k = options.top_k if 0 < options.top_k < vocab else 0
        temperature = 0.0 if options.is_greedy else options.temperature
        state.set_sampling(slot, temperature, int(rows.seeds[slot]), top_k, options.top_p, options.min_p)
        state.set_rare_options(slot, options.typical_p, options.xtc_threshold, options.xtc_probability)
        state.set_logprobs(slot, options.logprobs)
        edits.set(slot, own_edits[slot])
        if own_edits[slot].counts_tokens:
            edits.set_history(slot, np.array(rows.prompts[slot]), rows.outputs[slot])
    masked = [slot for slot in range(num_rows) if rows.masks[slot] is not None]
    if masked:
        JointMasks().fill([rows.masks[slot] for slot in masked], edits.mask_rows(np.array(masked)))
    state.set_lengths(np.arange(num_rows), rows.positions - 1)
    state.send()
    edits.send()
    mode = Mode.of(
        any(options.temperature > 0 for options in params),
        any(options.filters_tokens(vocab) for options in params),
        any(not own.is_empty for own in own_edits),
        any(options.needs_logprobs for options in params),
        any(options.typical_p < 1.0 or options.xtc_probability > 0.0 for options in params),
    )
    results = Results.new(1, num_rows, mode, pinned=device != "cpu")
    slots = torch.arange(num_rows, dtype=torch.int32, device=device)
    turn = torch.zeros(1, dtype=torch.int32, device=device)
    choose_tokens(torch.from_numpy(logits).to(device), slots, state, turn, results, mode, edits, **sizes)
    if device != "cpu":
        torch.cuda.synchronize()
    outcome = SampledTokens.unknown(num_rows)
    outcome.token_ids = results.chosen[0].numpy().copy()
    assert np.array_equal(state.lengths.cpu().numpy(), rows.positions), "every slot advances by its token"
    assert np.array_equal(state.tokens.cpu().numpy(), outcome.token_ids)
    for slot in (slot for slot, own in enumerate(own_edits) if own.counts_tokens):
        check_counts(edits.counts[slot].cpu().numpy(), rows, slot, int(outcome.token_ids[slot]))
    if results.scores is not None:
        _put_scores(outcome, results.scores[0].numpy(), params)
    return outcome


def _edits_of(table: SamplingTable, slot: int) -> LogitEdits:
    state = table.states[slot]
    assert state is not None
    edits = device_edits(state)
    assert edits is not None
    return edits


def check_counts(counts: np.ndarray, rows: Rows, slot: int, token: int) -> None:
    """The device has counted prompt, output and the drawn token."""
    output = [*rows.outputs[slot], *([token] if token >= 0 else [])]
    assert np.array_equal(counts & 0x7FFFFFFF, np.bincount(output, minlength=len(counts)))
    assert np.array_equal(np.flatnonzero(counts < 0), np.unique(rows.prompts[slot]))


def _put_scores(outcome: SampledTokens, words: np.ndarray, params: list[SamplingParams]) -> None:
    wanted = np.array([-1 if options.logprobs is None else options.logprobs for options in params])
    found = finish_scores(read_scores(words), wanted)
    rows = np.flatnonzero((wanted >= 0) & (outcome.token_ids >= 0))
    outcome.put_scores(rows, found.take(rows))


def on_host(logits: Any, rows: Rows) -> SampledTokens:
    """The outcome of the definition, for numpy arrays or torch tensors."""
    vocab = logits.shape[1]
    return Sampler(vocab, rows.table(vocab)).sample(logits, np.arange(len(rows.params)), rows.positions)


def differences(found: SampledTokens, expected: SampledTokens) -> list[int]:
    """The rows in which two outcomes differ; logprobs are compared bit for bit."""
    same = (found.token_ids == expected.token_ids) & (found.ranks == expected.ranks)
    same &= found.logprobs.view(np.int32) == expected.logprobs.view(np.int32)
    tops = zip(found.top, expected.top, strict=True)
    return [row for row, (ours, theirs) in enumerate(tops) if not same[row] or ours != theirs]
