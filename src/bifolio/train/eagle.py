"""Training of an EAGLE-3 head for a model: `bifolio train --eagle MODEL`.

text       of files, or written by the model itself (`LLM.generate`)
states     of all positions, by the model's prefill (`Batch.taps`)
head       learns the target's own distributions, several draft tokens deep (`train.eagle_head`)
folder     in the published layout, which `--speculative eagle --draft-model` reads
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from bifolio.api.llm import LLM
from bifolio.cache.block_manager import KVCacheBlockManager
from bifolio.cache.storage import KvCacheEntry
from bifolio.config import CacheConfig
from bifolio.engine.executor import ModelRunner, PrefillExecutor
from bifolio.engine.state_plan import num_live_states
from bifolio.errors import ConfigError
from bifolio.kernels.interface import Array, Batch
from bifolio.kernels.select import select_kernels
from bifolio.model.eagle import write_eagle
from bifolio.model.loaded import LoadedModel
from bifolio.model.loader import load_model
from bifolio.sampling_params import SamplingParams
from bifolio.train.data import read_documents
from bifolio.train.eagle_head import EagleHead, head_config, rows_of, taps_of
from bifolio.train.progress import Progress, make_progress

FADING = 0.8  # weight of a draft token in the loss, as a share of that of the token before it
COVERED = 0.995  # share of all tokens of the text that the head's vocabulary covers by default
MOST_HELD_OUT = 16  # sequences
WARM_UP = 10  # steps
TEMPERATURES = (0.6, 0.8, 1.0)  # of text that the model writes


@dataclass(frozen=True, slots=True)
class EagleSettings:
    """Settings of one run."""

    target: str
    output: str = "eagle"
    data: tuple[str, ...] = ()  # text files; without them the model writes the text itself
    steps: int = 300
    batch_size: int = 4  # sequences of a step
    context: int = 128  # tokens of a sequence
    sequences: int = 320  # at most
    depth: int = 3  # draft tokens of a chain that are trained
    draft_vocab_size: int | None = None  # None: as many as cover nearly all tokens of the text
    learning_rate: float = 2e-3
    seed: int = 0
    force: bool = False
    max_minutes: float = 8.0  # of the optimizer; 0: no limit
    threads: int | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "context", "sequences", "depth"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.context < self.depth + 3:
            raise ConfigError(f"a sequence needs at least {self.depth + 3} tokens for {self.depth} drafts")


@dataclass(frozen=True, slots=True)
class EagleResult:
    """The outcome of a run."""

    folder: Path
    steps_done: int
    losses: list[float]  # of each step
    agreement: list[float]  # share of held-out positions at which draft token 1, 2, ... is the target's favourite


def train_eagle(settings: EagleSettings, progress: Progress | None = None) -> EagleResult:
    """Train a head and write its folder."""
    folder = Path(settings.output)
    if not settings.force and any((folder / name).exists() for name in ("config.json", "model.safetensors")):
        raise ConfigError(
            f"the folder {folder} holds a model already: replace it with --force, or choose another --output"
        )
    target = load_model(settings.target)
    if target.config.learned_positions:
        raise ConfigError("heads are trained for models with rope: choose another model")
    torch.manual_seed(settings.seed)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    progress = progress or make_progress(True)
    try:
        texts = token_sequences(target, settings, progress)
        progress.message(f"text: {texts.size} tokens in {len(texts)} sequences of {texts.shape[1]}")
        run = _Run(target, settings, texts, collect_states(target, texts, settings.threads))
        return run.train(folder, progress)
    finally:
        progress.close()


# -- text and states --------------------------------------------------------------------------------------------------
def token_sequences(target: LoadedModel, settings: EagleSettings, progress: Progress) -> np.ndarray:
    """i32[sequences, context]: of the files, or written by the model."""
    length = settings.context
    most = min(settings.sequences, settings.steps * settings.batch_size + MOST_HELD_OUT)
    if settings.data:
        tokenizer = target.require_tokenizer()
        ids = np.concatenate([np.array(tokenizer.encode(text), np.int32) for text in read_documents(settings.data)])
        count = min(len(ids) // length, most)
        if not count:
            raise ConfigError(f"the text has {len(ids)} tokens, fewer than one sequence of {length}: pass more text")
        starts = np.linspace(0, len(ids) - length, count).astype(int)
        return np.stack([ids[start : start + length] for start in starts])
    progress.message(f"the model writes {most} sequences of {length} tokens")
    llm = LLM(target, device="cpu", max_model_len=length, threads=settings.threads)
    rng = np.random.default_rng(settings.seed)
    first = [] if target.config.bos_token_id is None else [target.config.bos_token_id]
    prompts = [first or rng.integers(0, target.config.vocab_size, size=1).tolist() for _ in range(most)]
    params = [
        SamplingParams(temperature=TEMPERATURES[number % len(TEMPERATURES)], seed=number, ignore_eos=True,
                       max_tokens=length - 1)
        for number in range(most)
    ]  # fmt: skip
    outputs = llm.generate(prompts, params, use_tqdm=False)
    written = [[*prompt, *output.outputs[0].token_ids] for prompt, output in zip(prompts, outputs, strict=True)]
    return np.array([tokens[:length] for tokens in written if len(tokens) >= length], np.int32)


class States(NamedTuple):
    """Hidden states in f16, each divided by its largest value: those of some models exceed the range of f16."""

    values: np.ndarray  # f16[sequences, context, taps, d]
    scales: np.ndarray  # f32[sequences, context, taps, 1]

    def rows(self, sequences: np.ndarray) -> torch.Tensor:
        """f32[n, context, taps * d]"""
        found = torch.from_numpy(self.values[sequences].astype(np.float32) * self.scales[sequences])
        return found.flatten(2)

    def sizes(self) -> np.ndarray:
        """f32[taps]: the root of the mean square of the states after each layer, without outliers among the tokens."""
        squares = np.square(self.values.astype(np.float32)).mean(axis=-1, keepdims=True) * np.square(self.scales)
        return np.asarray(np.sqrt(np.median(squares[..., 0], axis=(0, 1))), np.float32)


def collect_states(target: LoadedModel, texts: np.ndarray, threads: int | None) -> States:
    """The states after the layers that the head reads, and the last one."""
    kernels = select_kernels("cpu", threads=threads)
    taps = (*taps_of(target.config.num_layers), target.config.num_layers)
    length = texts.shape[1]
    cache = CacheConfig(-(-length // 16) + 1, 16, num_states=num_live_states(target.config, 1))
    model = replace(target, weights=target.weights.tapped(_distinct(taps)))
    runner = ModelRunner.new(model, cache, kernels)
    blocks = KVCacheBlockManager(cache.num_blocks, 16, enable_prefix_caching=False, num_states=cache.num_states)
    executor = PrefillExecutor(runner, length)
    distinct, d = _distinct(taps), target.config.hidden_size
    order = [distinct.index(tap) for tap in taps]
    values = np.empty((len(texts), length, len(taps), d), np.float16)
    scales = np.empty((len(texts), length, len(taps), 1), np.float32)
    for number, tokens in enumerate(texts):

        def run(batch: Batch, row: int = number) -> Array:
            tapped = runner.with_taps(batch)
            logits = executor.run(tapped)
            states = kernels.to_host(tapped.taps).reshape(length, len(distinct), d) * target.config.residual_scale
            largest = np.maximum(np.abs(states).max(axis=-1, keepdims=True), np.float32(1e-30))
            values[row], scales[row] = (states / largest)[:, order], largest[:, order]
            return logits

        entry = KvCacheEntry.open(runner.storage, blocks)
        executor.append([entry], [tokens], run)
        entry.close()
    return States(values, scales)


def _distinct(taps: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(taps))


def draft_vocabulary(texts: np.ndarray, vocab_size: int, count: int | None) -> np.ndarray:
    """i64[n]: the most frequent tokens of the text, in the order of their ids."""
    frequencies = np.bincount(texts.reshape(-1), minlength=vocab_size)
    order = np.argsort(-frequencies, kind="stable")
    if count is None:
        covering = int(np.searchsorted(np.cumsum(frequencies[order]), COVERED * texts.size)) + 1
        count = -(-covering // 64) * 64
    return np.sort(order[: min(count, vocab_size)]).astype(np.int64)


# -- the run ----------------------------------------------------------------------------------------------------------
class _Run:
    """The head, its data and its optimizer."""

    def __init__(self, target: LoadedModel, settings: EagleSettings, texts: np.ndarray, states: States) -> None:
        self.settings, self.target = settings, target
        self.config = head_config(target.config)
        self.token_ids = draft_vocabulary(texts, target.config.vocab_size, settings.draft_vocab_size)
        self.texts, self.states = texts, states
        self.num_held_out = min(max(len(texts) // 20, 1), MOST_HELD_OUT) if len(texts) > 1 else 0
        self.head = EagleHead(self.config, self.token_ids, states.sizes()[:3])
        self.head.start_from(target, self.token_ids)
        weights = target.weights
        self._labels_head = rows_of(weights.head.parts[0], self.token_ids)
        self._final_norm = torch.from_numpy(np.array(weights.final_norm.weight, np.float32))
        self.optimizer = torch.optim.AdamW(
            self.head.parameters(), settings.learning_rate, (0.9, 0.95), weight_decay=0.01
        )

    def train(self, folder: Path, progress: Progress) -> EagleResult:
        settings, losses = self.settings, []
        rng = np.random.default_rng(settings.seed)
        began = time.monotonic()
        order = np.arange(0)
        for step in range(1, settings.steps + 1):
            if len(order) < settings.batch_size:
                order = np.concatenate([order, rng.permutation(np.arange(self.num_held_out, len(self.texts)))])
            rows, order = order[: settings.batch_size], order[settings.batch_size :]
            for group in self.optimizer.param_groups:
                group["lr"] = settings.learning_rate * _share(step, self._done(step, time.monotonic() - began))
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
        taps = taps_of(self.target.config.num_layers)
        write_eagle(folder, self.config, taps, self.token_ids, self.head.tensors())
        shown = ", ".join(f"{share:.0%}" for share in agreement)
        progress.message(f"draft tokens that are the model's favourite in held-out text: {shown}\nwrote {folder}")
        return EagleResult(folder, len(losses), losses, agreement)

    def _done(self, step: int, seconds: float) -> float:
        """Share of the run that is over, by steps or by the time limit."""
        limit = 60 * self.settings.max_minutes
        return min(max(step / self.settings.steps, seconds / limit if limit else 0.0), 1.0)

    def _loss(self, rows: np.ndarray) -> tuple[torch.Tensor, list[float]]:
        """(Cross-entropy to the target's distributions over all draft depths, shares of equal favourites)."""
        d, depth = self.config.hidden_size, self.settings.depth
        states = self.states.rows(rows)
        ids = torch.from_numpy(self.texts[rows].astype(np.int64))
        embeddings = rows_of(self.target.weights.embedding, self.texts[rows].reshape(-1)).reshape(*ids.shape, d)
        with torch.no_grad():
            last = F.rms_norm(states[..., 3 * d :], (d,), self._final_norm, self.target.config.norm_eps)
            labels = F.linear(last, self._labels_head).softmax(dim=-1)
        # entry k of chain j reads the token at j + k + 1 and is compared with the target's distribution there
        logits = self.head(states[:, :-1, : 3 * d], embeddings[:, 1:], depth)
        total, equal = torch.zeros(()), []
        for k, found in enumerate(logits):
            wanted = labels[:, k + 1 : k + 1 + found.shape[1]]
            total = total - FADING**k * (wanted * found.log_softmax(dim=-1)).sum(-1).mean()
            equal.append((found.argmax(-1) == wanted.argmax(-1)).float().mean().item())
        return total / sum(FADING**k for k in range(depth)), equal

    @torch.no_grad()
    def _agreement(self) -> list[float]:
        return self._loss(np.arange(max(self.num_held_out, 1)))[1]


def _share(step: int, done: float) -> float:
    """Share of the highest learning rate: a short warm-up, then a cosine to a tenth at the end of the run."""
    return min(step / WARM_UP, 0.55 + 0.45 * math.cos(math.pi * done))
