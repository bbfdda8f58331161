"""Training of an EAGLE-3 head for a model: `bifolio train --eagle MODEL`.

text       of files, or written by the model itself (`train.head_data`)
states     of all positions, by the model's prefill (`Batch.taps`)
head       learns the target's own distributions, several draft tokens deep (`train.head_run`)
folder     in the published layout, which `--speculative eagle --draft-model` reads
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from bifolio.errors import ConfigError
from bifolio.model.eagle import write_eagle
from bifolio.model.loaded import LoadedModel
from bifolio.train.eagle_head import EagleHead, head_config, taps_of
from bifolio.train.head_data import collect_states
from bifolio.train.head_run import HeadResult, HeadRun, HeadSettings, train_head
from bifolio.train.progress import Progress

COVERED = 0.995  # share of all tokens of the text that the head's vocabulary covers by default


@dataclass(frozen=True, slots=True)
class EagleSettings(HeadSettings):
    """Settings of one run."""

    output: str = "eagle"
    draft_vocab_size: int | None = None  # None: as many as cover nearly all tokens of the text


def train_eagle(settings: EagleSettings, progress: Progress | None = None) -> HeadResult:
    """Train a head and write its folder."""

    def start(target: LoadedModel, texts: np.ndarray) -> HeadRun:
        return _EagleRun(target, settings, texts)

    return train_head(settings, _check, start, progress)


def _check(target: LoadedModel) -> None:
    if target.config.learned_positions:
        raise ConfigError("heads are trained for models with rope: choose another model")


def draft_vocabulary(texts: np.ndarray, vocab_size: int, count: int | None) -> np.ndarray:
    """i64[n]: the most frequent tokens of the text, in the order of their ids."""
    frequencies = np.bincount(texts.reshape(-1), minlength=vocab_size)
    order = np.argsort(-frequencies, kind="stable")
    if count is None:
        covering = int(np.searchsorted(np.cumsum(frequencies[order]), COVERED * texts.size)) + 1
        count = -(-covering // 64) * 64
    return np.sort(order[: min(count, vocab_size)]).astype(np.int64)


class _EagleRun(HeadRun):
    """A head that reads three states of the target and has the most frequent tokens of the text."""

    def __init__(self, target: LoadedModel, settings: EagleSettings, texts: np.ndarray) -> None:
        self.taps = taps_of(target.config.num_layers)
        states = collect_states(target, texts, self.taps, settings.threads)
        self.token_ids = draft_vocabulary(texts, target.config.vocab_size, settings.draft_vocab_size)
        self.eagle = EagleHead(head_config(target.config), self.token_ids, states.sizes()[:3])
        self.eagle.start_from(target, self.token_ids)
        super().__init__(target, settings, texts, states, self.eagle, self.token_ids)

    def head_states(self, states: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        return states[..., : -last.shape[-1]]

    def write(self, folder: Path) -> None:
        write_eagle(folder, self.eagle.config, self.taps, self.token_ids, self.eagle.tensors())
