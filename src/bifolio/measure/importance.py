"""The inputs of the matrices of a model over a text: the sum of squares of every column."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import numpy as np
from numpy.typing import NDArray

from bifolio.api.llm import LLM
from bifolio.errors import RequestError
from bifolio.kernels.interface import (
    Array,
    AttentionPhase,
    Batch,
    KernelSet,
    Linear,
    Network,
    RoutedExperts,
    SharedMlp,
    SlotSizes,
    StepProgram,
    Storage,
)
from bifolio.measure.part_clock import PartClock
from bifolio.measure.timed_kernels import TimedKernels
from bifolio.model.families import family_of
from bifolio.model.loaded import LoadedModel
from bifolio.model.weights import ModelWeights
from bifolio.sampling_params import SamplingParams


@dataclass(slots=True)
class ColumnSums:
    """Sums of squares and numbers of rows, by the name of a matrix in a GGUF file."""

    sums: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def add(self, names: tuple[str, ...], x: NDArray[np.float32]) -> None:
        squares = np.square(x, dtype=np.float64).sum(axis=0)
        for name in names:
            self.sums[name] = self.sums.get(name, 0.0) + squares
            self.counts[name] += len(x)


class WatchedKernels(TimedKernels):
    """The kernel set inside, which also adds up the inputs of every product of a layer; its clock stands still."""

    def __init__(self, inner: KernelSet, columns: ColumnSums) -> None:
        super().__init__(inner, PartClock())
        self.column_sums = columns
        self._names: dict[int, tuple[str, ...]] = {}  # id of a Linear -> its matrices; absent: the head

    def attach(self, weights: ModelWeights) -> None:
        """Learn the prepared weights that will be passed to `linear`."""
        names = family_of(weights.config).gguf_names
        for index, layer in enumerate(weights.layers):
            prefix = names.layer.format(index)
            groups = (
                (layer.qkv, names.qkv),
                (layer.output, (names.output,)),
                (layer.up, names.up),
                (layer.down, (names.down,)),
            )
            for linear, parts in groups:
                self._names[id(linear)] = tuple(f"{prefix}{part}.weight" for part in parts)

    def record(self, network: Network, phase: AttentionPhase) -> StepProgram:
        """The verbs one by one."""
        return _Verbs(self, network)

    def device_slots(self, network: Network, storage: Storage, sizes: SlotSizes) -> None:
        """None: a step that runs on the device as a whole cannot be watched."""
        return

    def fold_shared(self, routed: RoutedExperts, shared: SharedMlp) -> None:
        """None: the products of the shared MLP are watched."""
        return

    def linear(self, x: Array, linear: Linear) -> Array:
        names = self._names.get(id(linear))
        if names is not None:
            self.column_sums.add(names, self.inner.to_host(x))
        return self.inner.linear(x, linear)


@dataclass(frozen=True, slots=True)
class _Verbs:
    kernels: WatchedKernels
    network: Network

    def run(self, batch: Batch, storage: Storage) -> Array:
        return self.network.forward(cast(KernelSet, self.kernels), batch, storage)


def column_sums(
    model: LoadedModel,
    kernels: KernelSet,
    text: str,
    *,
    window: int = 512,
    max_windows: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[ColumnSums, int]:
    """Run the model over whole windows of the text that do not overlap; also how many there were."""
    columns = ColumnSums()
    watched = WatchedKernels(kernels, columns)
    window = min(window, model.config.max_position)
    llm = LLM(
        model, kernels=cast(KernelSet, watched), max_model_len=window, max_num_seqs=1, enable_prefix_caching=False
    )
    watched.attach(llm.engine.runner.weights)
    tokens = model.require_tokenizer().encode(text)
    windows = [tokens[begin : begin + window] for begin in range(0, len(tokens) - window + 1, window)][:max_windows]
    if not windows:
        raise RequestError(f"the text has {len(tokens)} tokens and must have at least {window}: pass a longer one")
    params = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=0, detokenize=False)
    for number, ids in enumerate(windows):
        if progress is not None:
            progress(number, len(windows))
        llm.generate([ids], params, use_tqdm=False)
    return columns, len(windows)
