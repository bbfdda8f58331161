"""Training: text → tokenizer → tokens → steps of `prefill` with targets → a model folder.

Training and evaluation call `prefill`, samples call `decode`.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from bifolio.api.language_model import LanguageModel
from bifolio.errors import ConfigError
from bifolio.model.file_access import check_target
from bifolio.text.tokenizer import Tokenizer
from bifolio.train.checkpoint import History, load_best_weights, load_checkpoint, save_checkpoint
from bifolio.train.data import (
    END_OF_TEXT,
    SequenceSource,
    TokenData,
    evaluation_sequences,
    read_documents,
    tokenize,
)
from bifolio.train.distributed import Processes, joined
from bifolio.train.export import export
from bifolio.train.progress import Progress, make_progress
from bifolio.train.settings import TrainSettings
from bifolio.train.tokenizer import make_tokenizer

EVALUATION_BATCH = 32  # sequences of one evaluation pass


@dataclass(frozen=True, slots=True)
class Corpus:
    """Tokenized text; runs with the same tokens can share it."""

    tokenizer: Tokenizer
    tokens: TokenData


@dataclass(frozen=True, slots=True)
class TrainResult:
    """The result of a run as objects; the output folder holds the same as files."""

    model: LanguageModel
    tokenizer: Tokenizer
    history: History
    steps_done: int
    folder: Path
    finished: bool  # False when the run was interrupted; `resume` continues it


def prepare_corpus(settings: TrainSettings) -> Corpus:
    """Read the text, train or load the tokenizer, and tokenize the text."""
    documents = read_documents(settings.data)
    saved = Path(settings.output) / "tokenizer.json"  # a resumed run keeps its tokenizer
    kind = str(saved) if settings.resume and saved.is_file() else settings.tokenizer
    tokenizer = make_tokenizer(kind, documents, settings.vocab_size)
    return Corpus(tokenizer, tokenize(documents, tokenizer, settings.eval_fraction, settings.seed))


def train(settings: TrainSettings, corpus: Corpus | None = None, progress: Progress | None = None) -> TrainResult:
    """Train as specified by the settings; Ctrl-C saves a checkpoint and returns."""
    check_output(settings)
    with joined(settings.device) as processes:
        progress = progress or make_progress(processes.is_first)
        try:
            run = TrainingRun(settings, corpus or prepare_corpus(settings), processes, progress)
            return run.run()
        finally:
            progress.close()


def check_output(settings: TrainSettings) -> None:
    """Refuse a folder that cannot be written, and to replace the files of an earlier run unless the settings say so."""
    folder = Path(settings.output)
    check_target(folder / "config.json", overwrite=True)
    if settings.resume or settings.force:
        return
    kept = [
        name
        for name in ("checkpoint", "config.json", "tokenizer.json", "model.safetensors")
        if (folder / name).exists()
    ]
    if kept:
        raise ConfigError(
            f"the folder {folder} holds a model already ({', '.join(kept)}): continue it with --resume, replace it "
            "with --force, or choose another --output"
        )


class TrainingRun:
    """One run in one process."""

    def __init__(self, settings: TrainSettings, corpus: Corpus, processes: Processes, progress: Progress) -> None:
        passes = processes.count * settings.accumulate
        if settings.batch_size % passes:
            raise ConfigError(
                f"a batch of {settings.batch_size} sequences cannot be divided into {passes} equal parts "
                f"({processes.count} processes, {settings.accumulate} passes each)"
            )
        self.settings, self.corpus, self.processes, self.progress = settings, corpus, processes, progress
        self.folder = Path(settings.output)
        self.device = processes.device
        end_of_text = corpus.tokenizer.token_id(END_OF_TEXT)
        self.config = settings.model_config(corpus.tokenizer.vocab_size, end_of_text)
        self.model = LanguageModel(self.config, seed=settings.seed).to(self.device)
        self.optimizer = make_optimizer(self.model, settings)
        self.history, self.step = History(), 0
        self.best_weights: dict[str, torch.Tensor] | None = None
        self._restart_mean(0.0, 0)
        self.digest = corpus.tokens.digest
        if settings.resume:
            self.step, self.history = load_checkpoint(
                self.folder / "checkpoint", self.model, self.optimizer, settings, self.digest
            )
            self._restart_mean(*self.history.unfinished_point)
            if settings.keep_best:
                self.best_weights = load_best_weights(self.folder / "checkpoint", self.model)
        if settings.compile:
            self.model.compile_network()
        self.replica = self._replicate()
        self.source = SequenceSource(corpus.tokens.train, self.config.max_position, settings.seed, self.device)
        self.evaluation = evaluation_sequences(
            corpus.tokens.held_out, self.config.max_position, settings.eval_sequences
        )
        self.teacher = self._load_teacher()
        self.interrupted = False

    # -- the loop -------------------------------------------------------------------------------------------
    def run(self) -> TrainResult:
        self._announce()
        with self._interruptible():
            self._train_steps()
        if self.processes.is_first:
            if not self.interrupted and self.history.last_evaluation != self.step:
                self._note_evaluation()  # the time limit ended the run between two evaluations
            self._save()
            if self.interrupted:
                self.progress.message(f"stopped at step {self.step}; continue with --resume")
            else:
                self._finish()
        self.processes.wait()
        return TrainResult(
            self.model, self.corpus.tokenizer, self.history, self.step, self.folder, not self.interrupted
        )

    def _train_steps(self) -> None:
        settings, began, seconds_before = self.settings, time.monotonic(), self.history.seconds
        since, step_since = began, self.step
        while self.step < settings.steps and not self._stopped(began):
            self.loss_sum += self._train_step()
            self.loss_count += 1
            self.step += 1
            if self.step % settings.log_every == 0 or self.step == settings.steps:
                mean = self.processes.average(self.loss_sum / self.loss_count).item()  # synchronises with the device
                now = time.monotonic()
                speed = (self.step - step_since) * settings.batch_size * self.config.max_position / (now - since)
                self.history.train.append((self.step, mean))
                self.history.seconds = seconds_before + now - began
                self.progress.step(self.step, settings.steps, mean, settings.learning_rate_at(self.step - 1), speed)
                self._restart_mean(0.0, 0)
                since, step_since = now, self.step
            self._run_periodic()

    def _restart_mean(self, loss_sum: float, loss_count: int) -> None:
        """Reset the loss since the last point of the curve; the sum is on the device, so steps do not synchronise."""
        self.loss_sum, self.loss_count = torch.tensor(loss_sum, device=self.device), loss_count

    def _train_step(self) -> torch.Tensor:
        """Run one optimizer step over this process's share of the batch; return its mean loss on the device."""
        settings = self.settings
        inputs, targets = self.source.batch(self.step, settings.batch_size, self.processes.rows(settings.batch_size))
        total = torch.zeros((), device=self.device)
        pairs = list(zip(inputs.chunk(settings.accumulate), targets.chunk(settings.accumulate), strict=True))
        for i, (xb, yb) in enumerate(pairs):
            with self._sync_gradients(i == len(pairs) - 1), self._mixed_precision():
                logits, loss = self._prefill(xb, yb)  # PREFILL PHASE
                if self.teacher is not None:
                    loss = self._distance_to_teacher(xb, logits)
            (loss / len(pairs)).backward()
            total += loss.detach() / len(pairs)
        if settings.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = settings.learning_rate_at(self.step)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total

    def _prefill(self, xb: torch.Tensor, yb: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """`prefill`; with several processes through DDP's wrapper, whose call delegates to it."""
        if self.processes.count > 1:
            logits, loss = self.replica(xb, yb)
            return logits, loss
        return self.model.prefill(xb, yb)

    def _distance_to_teacher(self, xb: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Distillation loss: cross-entropy against the distribution of the teacher instead of the target token."""
        assert self.teacher is not None
        with torch.no_grad():
            expected, _ = self.teacher.prefill(xb)  # PREFILL PHASE
        return F.cross_entropy(logits.flatten(0, 1), expected.flatten(0, 1).softmax(dim=-1))

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss over the held-out sequences."""
        self.model.eval()
        inputs, targets = self.evaluation
        total = 0.0
        for xb, yb in zip(torch.split(inputs, EVALUATION_BATCH), torch.split(targets, EVALUATION_BATCH), strict=True):
            with self._mixed_precision():
                _, loss = self.model.prefill(xb.to(self.device), yb.to(self.device))  # PREFILL PHASE
            assert loss is not None
            total += loss.item() * len(xb)
        self.model.train()
        return total / len(inputs)

    def sample(self) -> str:
        """Sample a text from the model."""
        tokenizer, settings = self.corpus.tokenizer, self.settings
        prompt = tokenizer.encode(settings.sample_prompt) or [0]
        idx = torch.tensor([prompt], device=self.device)
        self.model.eval()
        out = self.model.decode(  # DECODE PHASE
            idx,
            settings.sample_tokens,
            temperature=settings.sample_temperature,
            seed=settings.seed,
            stop_token_ids=self.config.eos_token_ids,
        )
        self.model.train()
        return tokenizer.decode(out[0].tolist())

    # -- internals --------------------------------------------------------------------------------------------
    def _run_periodic(self) -> None:
        """Run evaluations, samples and checkpoints at their intervals, in the first process only."""
        settings = self.settings
        if not self.processes.is_first:
            return
        last = self.step == settings.steps
        if self.step % settings.steps_between_evaluations == 0 or last:
            self._note_evaluation()
        if settings.sample_every and (self.step % settings.sample_every == 0 or last):
            self.progress.message(f"step {self.step} sample: {self.sample()}")
        if settings.save_every and self.step % settings.save_every == 0 and not last:
            self._save()

    def _note_evaluation(self) -> None:
        loss = self.evaluate()
        self.history.held_out.append((self.step, loss))
        if self.settings.keep_best and self.history.best == (self.step, loss):
            self.best_weights = {n: p.detach().clone() for n, p in self.model.named_parameters()}
        self.progress.message(f"step {self.step}: held-out loss {loss:.4f}")

    def _save(self) -> None:
        self.history.unfinished_point = (self.loss_sum.item(), self.loss_count)
        save_checkpoint(
            self.folder / "checkpoint",
            self.step,
            self.model,
            self.optimizer,
            self.history,
            self.settings,
            self.digest,
            self.best_weights,
        )
        self.corpus.tokenizer.backend.save(str(self.folder / "tokenizer.json"))

    def _finish(self) -> None:
        if self.best_weights is not None:
            with torch.no_grad():
                for name, parameter in self.model.named_parameters():
                    parameter.copy_(self.best_weights[name])
        for line in export(self.folder, self.model, self.corpus.tokenizer, self.corpus.tokens, self.history,
                           self.settings):  # fmt: skip
            self.progress.message(line)

    def _announce(self) -> None:
        tokens = self.corpus.tokens
        self.progress.message(
            f"{self.config.architecture} model, {self.config.num_parameters:,} parameters, vocabulary "
            f"{self.config.vocab_size}, context {self.config.max_position}; {tokens.num_documents} documents, "
            f"{len(tokens.train):,} training and {len(tokens.held_out):,} held-out tokens; "
            f"{self.processes.count} process(es) on {self.device}"
        )

    def _load_teacher(self) -> LanguageModel | None:
        if self.settings.teacher is None:
            return None
        teacher = LanguageModel.from_pretrained(self.settings.teacher).to(self.device).eval()
        if teacher.config.vocab_size != self.config.vocab_size:
            raise ConfigError(
                f"the teacher has {teacher.config.vocab_size} tokens and the model {self.config.vocab_size}: "
                "pass the teacher's tokenizer.json as --tokenizer"
            )
        return teacher

    def _replicate(self) -> torch.nn.Module:
        if self.processes.count == 1:
            return self.model
        return torch.nn.parallel.DistributedDataParallel(self.model)

    def _sync_gradients(self, is_last: bool) -> AbstractContextManager[Any]:
        """Skip the all-reduce of gradients in all passes of a step but the last."""
        if self.processes.count == 1 or is_last:
            return nullcontext()
        return self.replica.no_sync()  # type: ignore[operator, no-any-return]

    def _mixed_precision(self) -> AbstractContextManager[Any]:
        on_cuda = self.device.startswith("cuda")
        enabled = on_cuda if self.settings.bf16 is None else self.settings.bf16
        return torch.autocast("cuda" if on_cuda else "cpu", torch.bfloat16) if enabled else nullcontext()

    def _stopped(self, began: float) -> bool:
        """Whether Ctrl-C or the time limit ends the run before the next step; equal in all processes."""
        if self.processes.count > 1 and self.step % self.settings.log_every:
            return False  # the collective check costs time
        self.interrupted = self.processes.any(self.interrupted)
        limit = self.settings.max_minutes * 60
        timed_out = bool(limit) and self.processes.any(time.monotonic() - began > limit)
        if timed_out:
            self.progress.message(f"time limit reached at step {self.step}")
        return self.interrupted or timed_out

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Defer Ctrl-C to the end of the current step; a second Ctrl-C interrupts at once."""

        def interrupt(signum: int, frame: Any) -> None:
            if self.interrupted:
                raise KeyboardInterrupt
            self.interrupted = True

        before: Any = None
        with contextlib.suppress(ValueError):  # signal handlers can be set in the main thread only
            before = signal.signal(signal.SIGINT, interrupt)
        try:
            yield
        finally:
            if before is not None:
                signal.signal(signal.SIGINT, before)


def make_optimizer(model: LanguageModel, settings: TrainSettings) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices and embeddings, not on norms and biases."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]
    betas = (settings.beta1, settings.beta2)
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=betas, fused=True)
