"""The data of draft heads: text of files or written by the model, and the hidden states of the model in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from bifolio.api.llm import LLM
from bifolio.cache.block_manager import KVCacheBlockManager
from bifolio.cache.storage import KvCacheEntry
from bifolio.config import CacheConfig
from bifolio.engine.executor import ModelRunner, PrefillExecutor
from bifolio.engine.state_plan import num_live_states
from bifolio.errors import ConfigError
from bifolio.kernels.interface import Array, Batch
from bifolio.kernels.select import select_kernels
from bifolio.model.loaded import LoadedModel
from bifolio.quant.tensor import QuantizedTensor
from bifolio.sampling_params import SamplingParams
from bifolio.train.data import read_documents
from bifolio.train.progress import Progress

if TYPE_CHECKING:
    from bifolio.train.head_run import HeadSettings

MOST_HELD_OUT = 16  # sequences
TEMPERATURES = (0.6, 0.8, 1.0)  # of text that the model writes


def token_sequences(target: LoadedModel, settings: HeadSettings, progress: Progress) -> np.ndarray:
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


def collect_states(target: LoadedModel, texts: np.ndarray, layers: Sequence[int], threads: int | None) -> States:
    """The states after the numbers of layers that the head reads, and the last one."""
    kernels = select_kernels("cpu", threads=threads)
    taps = (*layers, target.config.num_layers)
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


def array_of(tensor: QuantizedTensor | Array, rows: np.ndarray | None = None) -> np.ndarray:
    """Rows of a matrix as f32; by default all."""
    if isinstance(tensor, QuantizedTensor):
        return np.array(tensor.dequantize() if rows is None else tensor.dequantize_rows(rows), np.float32)
    return np.array(tensor if rows is None else tensor[rows], np.float32)


def rows_of(tensor: QuantizedTensor | Array, rows: np.ndarray | None = None) -> torch.Tensor:
    return torch.from_numpy(array_of(tensor, rows))
