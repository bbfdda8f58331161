"""The inputs of the matrices of a model over a text: the sum of squares of every column."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from bifolio.api.llm import LLM
from bifolio.errors import RequestError
from bifolio.kernels.interface import Array, KernelSet, Linear
from bifolio.kernels.operation_hook import hooked
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


class LinearInputs:
    """Adds up the inputs of every product of a layer."""

    def __init__(self) -> None:
        self.columns = ColumnSums()
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

    def hook(self, name: str, work: Callable[[Array, Linear], Array], x: Array, linear: Linear) -> Array:
        found = self._names.get(id(linear))
        if found is not None:
            self.columns.add(found, np.asarray(x))
        return work(x, linear)


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
    inputs = LinearInputs()
    watched = hooked(kernels, inputs.hook, ["linear"], one_by_one=True)
    window = min(window, model.config.max_position)
    llm = LLM(model, kernels=watched, max_model_len=window, max_num_seqs=1, enable_prefix_caching=False)
    inputs.attach(llm.engine.runner.weights)
    tokens = model.require_tokenizer().encode(text)
    windows = [tokens[begin : begin + window] for begin in range(0, len(tokens) - window + 1, window)][:max_windows]
    if not windows:
        raise RequestError(f"the text has {len(tokens)} tokens and must have at least {window}: pass a longer one")
    params = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=0, detokenize=False)
    for number, ids in enumerate(windows):
        if progress is not None:
            progress(number, len(windows))
        llm.generate([ids], params, use_tqdm=False)
    return inputs.columns, len(windows)
