"""Requests for vectors and scores: their passes, and the way from hidden states to the result.

    launch    hidden states of all their tokens; on the device a row for each sequence: the sum of its tokens, its first
              one or its last one
    collect   sums of the chunks of a prompt, dense layers over the rows of all prompts that ended, and activations

Such sequences wait, run and are preempted as all others; a step with both kinds runs a pass of each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from bifolio.config import HeadConfig, ModelConfig, PoolingConfig
from bifolio.config.pooling import PoolingKind
from bifolio.engine.adapters import LoadedAdapter
from bifolio.engine.executor import ModelRunner
from bifolio.engine.host_batch import Readout
from bifolio.engine.slot_state import SlotState
from bifolio.errors import NO_FINITE_STATE, ModelOutputError, RequestError
from bifolio.model.pooler_weights import PoolerWeights, through
from bifolio.pooling_params import PoolingParams
from bifolio.schedule.plan import ScheduledSequence, StepPlan
from bifolio.sequence import Sequence

SMALLEST_NORM = 1e-12


@dataclass(slots=True)
class PooledResult:
    """How one request is pooled, and its result."""

    kind: PoolingKind
    normalize: bool
    dimensions: int | None
    head: HeadConfig | None  # of scores; None: of a vector
    activate: bool  # from logits to scores
    parts: list[np.ndarray] = field(default_factory=list)  # of the chunks so far
    value: np.ndarray | None = None  # f32[d], f32[tokens, d] or f32[labels], at the end

    @property
    def reads_all(self) -> bool:
        """Whether every token is read, so that none may come from the prefix cache."""
        return self.kind != "last"

    def add(self, part: np.ndarray, start: int) -> None:
        """The pooled rows of a chunk; after a preemption the first one comes again."""
        if start == 0 or self.kind == "last":
            self.parts.clear()
        if self.kind != "cls" or start == 0:
            self.parts.append(part)

    def joined(self, num_tokens: int) -> np.ndarray:
        """f32[1, d], or f32[tokens, d] without pooling."""
        if self.kind == "none":
            return np.concatenate(self.parts)
        if self.kind != "mean":
            return self.parts[0][None]
        total = np.sum(np.stack(self.parts), axis=0, dtype=np.float64)
        return np.asarray(total / num_tokens, np.float32)[None]

    def finish(self, rows: np.ndarray) -> None:
        """Set the result from the rows behind all dense layers; raises where they are not finite."""
        if not np.isfinite(rows).all():
            raise ModelOutputError(NO_FINITE_STATE)
        if self.head is not None:
            scores = rows[0] if not self.activate else activated(rows[0], self.head.activation)
            self.value = np.ascontiguousarray(scores, np.float32)
            return
        if self.dimensions is not None:
            rows = rows[:, : self.dimensions]
        if self.normalize:
            lengths = np.sqrt(np.square(rows, dtype=np.float64).sum(axis=1, keepdims=True))
            rows = rows / np.maximum(lengths, SMALLEST_NORM)
        rows = np.ascontiguousarray(rows, np.float32)
        self.value = rows if self.kind == "none" else rows[0]


def activated(logits: np.ndarray, activation: str) -> np.ndarray:
    """Scores of logits f32[labels]."""
    values = logits.astype(np.float64)
    if activation == "sigmoid":
        return np.asarray(0.5 * (1.0 + np.tanh(0.5 * values)))
    if activation == "softmax":
        weights = np.exp(values - values.max())
        return np.asarray(weights / weights.sum())
    return values


def pooled_result(params: PoolingParams, pooling: PoolingConfig, config: ModelConfig) -> PooledResult:
    """The pooling of a request; a `RequestError` says why the model cannot serve it."""
    size, head = pooling.size or config.hidden_size, pooling.head
    wants_scores = params.task in ("classify", "score") or (params.task is None and head is not None)
    if wants_scores and head is None:
        raise RequestError(
            "this model has no classifier: ask it for vectors (embed), or take a model for classification or reranking"
        )
    if not wants_scores and head is not None:
        raise RequestError("this model scores texts and makes no vectors of them: use classify or score")
    if params.task == "score" and head is not None and head.score is None:
        raise RequestError(
            f"this model gives texts one of {len(head.labels)} labels and scores no pairs: use classify, or a reranker"
        )
    if params.dimensions is not None and (wants_scores or params.dimensions > size):
        limit = "scores have no dimensions to choose" if wants_scores else f"the vectors of this model have {size}"
        raise RequestError(f"dimensions is {params.dimensions}: {limit}")
    usual = True if wants_scores else pooling.normalize
    activate = usual if params.activated is None else params.activated
    kind: PoolingKind = "none" if params.task == "token_embed" else pooling.kind
    return PooledResult(kind, activate, params.dimensions, head if wants_scores else None, activate)


@dataclass(slots=True)
class PooledPass:
    """A launched pass over sequences whose hidden states are pooled."""

    items: tuple[ScheduledSequence, ...]
    rows: dict[PoolingKind, Callable[[], np.ndarray]]  # wait for: f32[items, d], or of all tokens without pooling
    starts: np.ndarray  # i64[items + 1]  first token of each

    @classmethod
    def launch(cls, plan: StepPlan, runner: ModelRunner, slots: SlotState) -> PooledPass:
        """Queue the pass of a plan, and the reads of its rows."""
        batch = slots.stage(plan, slots.lay_out(plan, Readout()))
        states, kernels = runner.states(batch), runner.kernels
        starts = np.zeros(len(plan.prefills) + 1, np.int64)
        np.cumsum([item.num_new for item in plan.prefills], out=starts[1:])
        rows: dict[PoolingKind, Callable[[], np.ndarray]] = {}
        for kind in {item.sequence.request.pooling.kind for item in plan.prefills}:
            if kind == "none":
                rows[kind] = kernels.fetch(states)
            elif kind == "mean":
                rows[kind] = kernels.fetch(kernels.sum_rows(states, starts))
            else:
                wanted = starts[:-1] if kind == "cls" else starts[1:] - 1
                rows[kind] = kernels.fetch(kernels.take(states, kernels.from_host(wanted.astype(np.int32))))
        return cls(plan.prefills, rows, starts)

    def collect(self, runner: ModelRunner) -> list[tuple[Sequence, ModelOutputError | None]]:
        """The sequences that are done with this pass; their requests have results, or an error says why not."""
        values, ended = {kind: wait() for kind, wait in self.rows.items()}, []
        for number, item in enumerate(self.items):
            pooled: PooledResult = item.sequence.request.pooling
            if item.sequence.finish_reason is not None:  # aborted meanwhile
                continue
            rows = values[pooled.kind]
            part = rows[self.starts[number] : self.starts[number + 1]] if pooled.kind == "none" else rows[number]
            pooled.add(part, item.start)
            if item.start + item.num_new == item.sequence.num_prompt:
                ended.append(item.sequence)
        return _finished(ended, runner) if ended else []


def _classifier_of(sequence: Sequence) -> LoadedAdapter | None:
    """The adapter whose layers score a text; None: the base's."""
    adapter: LoadedAdapter | None = sequence.request.adapter
    return adapter if adapter is not None and adapter.pooler else None


def _behind(pooler: PoolerWeights, rows: list[np.ndarray], runner: ModelRunner) -> list[np.ndarray]:
    """The outputs of dense layers over the rows of several texts."""
    joined = runner.kernels.from_host(np.ascontiguousarray(np.concatenate(rows)))
    outputs = np.asarray(runner.kernels.to_host(through(pooler, joined, runner.kernels)), np.float32)
    return np.split(outputs, np.cumsum([len(each) for each in rows])[:-1])


def _finished(ended: list[Sequence], runner: ModelRunner) -> list[tuple[Sequence, ModelOutputError | None]]:
    """Run the dense layers over the rows of these sequences, all together, and set the results."""
    rows = [sequence.request.pooling.joined(sequence.num_prompt) for sequence in ended]
    if runner.weights.pooler is not None:
        adapters = {id(adapter): adapter for adapter in (_classifier_of(sequence) for sequence in ended)}
        for key, adapter in adapters.items():
            own = [number for number, sequence in enumerate(ended) if id(_classifier_of(sequence)) == key]
            pooler = runner.weights.pooler.changed({} if adapter is None else adapter.pooler)
            for number, outputs in zip(own, _behind(pooler, [rows[number] for number in own], runner), strict=True):
                rows[number] = outputs
    found: list[tuple[Sequence, ModelOutputError | None]] = []
    for sequence, own in zip(ended, rows, strict=True):
        pooled: PooledResult = sequence.request.pooling
        try:
            pooled.finish(own)
        except ModelOutputError as error:
            found.append((sequence, error))
        else:
            found.append((sequence, None))
        pooled.parts.clear()
    return found
