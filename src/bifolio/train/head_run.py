"""The optimizer run that trains a draft head: its settings, its loop and its loss.

A head learns the target's own distributions, several draft tokens deep: the later tokens of a draft are trained on the
head's own hidden states, as they are used (`train.draft_chain`).
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from bifolio.errors import ConfigError
from bifolio.model.file_access import check_target
from bifolio.model.loaded import LoadedModel
from bifolio.model.loader import load_model
from bifolio.train.draft_chain import DraftChain
from bifolio.train.head_data import MOST_HELD_OUT, States, rows_of, token_sequences
from bifolio.train.progress import Progress, make_progress
from bifolio.train.settings import COUNT, RANGES, check_ranges

FADING = 0.8  # weight of a draft token in the loss, as a share of that of the token before it
WARM_UP = 10  # steps


@dataclass(frozen=True, slots=True)
class HeadSettings:
    """Settings of one run."""

    target: str
    output: str = "head"
    data: tuple[str, ...] = ()  # text files; without them the model writes the text itself
    steps: int = 300
    batch_size: int = 4  # sequences of a step
    context: int = 128  # tokens of a sequence
    sequences: int = 320  # at most
    depth: int = 3  # draft tokens of a chain that are trained
    learning_rate: float = 2e-3
    seed: int = 0
    force: bool = False
    max_minutes: float = 8.0  # of the optimizer; 0: no limit
    threads: int | None = None

    def __post_init__(self) -> None:
        check_ranges(self, {**RANGES, "sequences": COUNT, "depth": COUNT})
        if self.context < self.depth + 3:
            raise ConfigError(f"a sequence needs at least {self.depth + 3} tokens for {self.depth} drafts")


@dataclass(frozen=True, slots=True)
class HeadResult:
    """The outcome of a run."""

    folder: Path
    steps_done: int
    losses: list[float]  # of each step
    agreement: list[float]  # share of held-out positions at which draft token 1, 2, ... is the target's favourite


def train_head(
    settings: HeadSettings,
    check: Callable[[LoadedModel], None],
    start: Callable[[LoadedModel, np.ndarray], HeadRun],
    progress: Progress | None,
) -> HeadResult:
    """Train a head and write its folder.

    `check` refuses models that cannot have such a head; `start` makes the run for a model and its text.
    """
    folder = Path(settings.output)
    check_target(folder / "config.json", overwrite=True)
    if not settings.force and any((folder / name).exists() for name in ("config.json", "model.safetensors")):
        raise ConfigError(
            f"the folder {folder} holds a model already: replace it with --force, or choose another --output"
        )
    target = load_model(settings.target)
    target.check_generates()
    check(target)
    torch.manual_seed(settings.seed)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    progress = progress or make_progress(True)
    try:
        texts = token_sequences(target, settings, progress)
        progress.message(f"text: {texts.size} tokens in {len(texts)} sequences of {texts.shape[1]}")
        return start(target, texts).train(folder, progress)
    finally:
        progress.close()


class HeadRun(ABC):
    """The head, its data and its optimizer."""

    def __init__(
        self,
        target: LoadedModel,
        settings: HeadSettings,
        texts: np.ndarray,
        states: States,
        head: DraftChain,
        token_ids: np.ndarray | None = None,
    ) -> None:
        """`token_ids`: i64[n] of the head's vocabulary; None: the target's."""
        self.settings, self.target, self.head = settings, target, head
        self.texts, self.states = texts, states
        self.num_held_out = min(max(len(texts) // 20, 1), MOST_HELD_OUT) if len(texts) > 1 else 0
        self.labels_head = rows_of(target.weights.head.parts[0], token_ids)
        self._final_norm = torch.from_numpy(np.array(target.weights.final_norm.weight, np.float32))
        self.optimizer = torch.optim.AdamW(head.parameters(), settings.learning_rate, (0.9, 0.95), weight_decay=0.01)

    @abstractmethod
    def head_states(self, states: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """The input of the head: a part of all states [b, n, taps * d], or the last ones, normed [b, n, d]."""

    @abstractmethod
    def write(self, folder: Path) -> None:
        """Write the trained head."""

    def train(self, folder: Path, progress: Progress) -> HeadResult:
        settings, losses = self.settings, []
        rng = np.random.default_rng(settings.seed)
        began = time.monotonic()
        order = np.arange(0)
        for step in range(1, settings.steps + 1):
            if len(order) < settings.batch_size:
                order = np.concatenate([order, rng.permutation(np.arange(self.num_held_out, len(self.texts)))])
            rows, order = order[: settings.batch_size], order[settings.batch_size :]
            for group in self.optimizer.param_groups:
                group["lr"] = settings.learning_rate * share_of_rate(step, self._done(step, time.monotonic() - began))
            loss, _ = self._loss(rows)
            self.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
            self.optimizer.step()
            losses.append(loss.item())
            seconds = time.monotonic() - began
            rate = self.optimizer.param_groups[0]["lr"]
            progress.step(step, settings.steps, losses[-1], rate, step * len(rows) * settings.context / seconds)
            if settings.max_minutes and seconds > 60 * settings.max_minutes:
                progress.message(f"stopped after {settings.max_minutes:g} minutes: --max-minutes sets the limit")
                break
        agreement = self._agreement()
        self.write(folder)
        shown = ", ".join(f"{share:.0%}" for share in agreement)
        progress.message(f"draft tokens that are the model's favourite in held-out text: {shown}\nwrote {folder}")
        return HeadResult(folder, len(losses), losses, agreement)

    def _done(self, step: int, seconds: float) -> float:
        """Share of the run that is over, by steps or by the time limit."""
        limit = 60 * self.settings.max_minutes
        return min(max(step / self.settings.steps, seconds / limit if limit else 0.0), 1.0)

    def _loss(self, rows: np.ndarray) -> tuple[torch.Tensor, list[float]]:
        """(Cross-entropy to the target's distributions over all draft depths, shares of equal favourites)."""
        d, depth = self.target.config.hidden_size, self.settings.depth
        states = self.states.rows(rows)
        ids = torch.from_numpy(self.texts[rows].astype(np.int64))
        embeddings = rows_of(self.target.weights.embedding, self.texts[rows].reshape(-1)).reshape(*ids.shape, d)
        with torch.no_grad():
            last = F.rms_norm(states[..., -d:], (d,), self._final_norm, self.target.config.norm_eps)
            labels = F.linear(last, self.labels_head).softmax(dim=-1)
        # entry k of chain j reads the token at j + k + 1 and is compared with the target's distribution there
        logits = self.head(self.head_states(states, last)[:, :-1], embeddings[:, 1:], depth)
        total, equal = torch.zeros(()), []
        for k, found in enumerate(logits):
            wanted = labels[:, k + 1 : k + 1 + found.shape[1]]
            total = total - FADING**k * (wanted * found.log_softmax(dim=-1)).sum(-1).mean()
            equal.append((found.argmax(-1) == wanted.argmax(-1)).float().mean().item())
        return total / sum(FADING**k for k in range(depth)), equal

    @torch.no_grad()
    def _agreement(self) -> list[float]:
        return self._loss(np.arange(max(self.num_held_out, 1)))[1]


def share_of_rate(step: int, done: float) -> float:
    """Share of the highest learning rate: a short warm-up, then a cosine to a tenth at the end of the run."""
    return min(step / WARM_UP, 0.55 + 0.45 * math.cos(math.pi * done))
