"""Seconds of prefill and decode workloads on random models: bifolio, llama.cpp and transformers."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from native_models import random_weights

from bifolio.api.llm import LLM
from bifolio.config import KVDtype, ModelConfig
from bifolio.engine.host_batch import HostBatch, Run
from bifolio.kernels.interface import AttentionPhase, Batch
from bifolio.kernels.native import NativeKernels
from bifolio.model.gguf.mixes import Mix
from bifolio.model.loaded import LoadedModel
from bifolio.quant.formats import QuantFormat

BLOCK_SIZE = 32
NUM_SLOTS = 10_624  # cache positions, more than any workload fills
SLOW_STEP = 4.0  # seconds; slower steps are measured once in a round


class Workload(NamedTuple):
    """A prefill if `queries` > 1, else a decode step."""

    name: str
    sequences: int
    queries: int  # new tokens of each sequence
    context: int  # tokens of each sequence before that
    repeats: int

    @property
    def num_tokens(self) -> int:
        return self.sequences * self.queries


WORKLOADS = (
    Workload("prefill 512", 1, 512, 0, 3),
    Workload("decode 1", 1, 1, 64, 24),
    Workload("decode 1 at 4096", 1, 1, 4096, 12),
    Workload("decode 16", 16, 1, 200, 10),
)


def time_repeats(step: Callable[[], object], repeats: int) -> float:
    """Median seconds of a step, after two warm-up steps; a slow step, or 0 repeats: one step after one."""

    def timed() -> float:
        begin = time.perf_counter()
        step()
        return time.perf_counter() - begin

    if timed() > SLOW_STEP or not repeats:
        return timed()
    timed()
    return statistics.median(timed() for _ in range(repeats))


class NativeModel:
    """A random model on the native kernels with a cache for every workload."""

    def __init__(
        self,
        config: ModelConfig,
        format: QuantFormat | Mix,
        kv_dtype: KVDtype,
        threads: int | None,
        block_size: int = BLOCK_SIZE,
    ) -> None:
        self.config = config
        self.block_size = block_size
        self.kernels = NativeKernels(threads)
        model = LoadedModel(Path("random"), config, weights=random_weights(config, format))
        sizes: Any = {"block_size": block_size, "num_blocks": 17 + NUM_SLOTS // block_size}
        self.llm = LLM(model, kernels=self.kernels, kv_cache_dtype=kv_dtype, **sizes)
        self.runner = self.llm.engine.runner
        self.prefill, self.decode = self.llm.engine.prefill_executor, self.llm.engine.decode_executor
        self.storage = self.runner.storage
        rng = np.random.default_rng(1)
        slots = np.arange(self.storage.num_blocks * block_size, dtype=np.int64)
        shape = (len(slots), config.num_kv_heads, config.head_dim)
        random = rng.standard_normal(shape, np.float32) * np.float32(0.1)
        for layer in range(config.num_layers):
            self.storage.write(layer, slots, random, random)

    def batch(self, workload: Workload) -> Batch:
        count, queries = workload.sequences, workload.queries
        blocks = -(-(workload.context + queries) // self.block_size)
        tables = 1 + np.arange(count * blocks, dtype=np.int32).reshape(count, blocks)
        ids = np.random.default_rng(2).integers(0, self.config.vocab_size, (count, queries)).astype(np.int32)
        runs = [Run(number, workload.context, ids[number]) for number in range(count)]
        last = range(queries - 1, count * queries, queries)
        decodes, prefills = ([], runs) if queries > 1 else (runs, [])
        return HostBatch.from_runs(decodes, prefills, tables, self.block_size, last).to(self.kernels)

    def run(self, batch: Batch) -> np.ndarray:
        """Run one forward pass on the executor of its phase."""
        executor = self.prefill if batch.segments[0].phase is AttentionPhase.PREFILL else self.decode
        return np.asarray(executor.run(batch))

    def seconds(self, workload: Workload) -> float:
        batch = self.batch(workload)
        return time_repeats(lambda: self.run(batch), workload.repeats)


class LlamaCppModel:
    """The workloads through llama.cpp's C interface.

    Contexts are computed once per shape and saved to files: the speed does not depend on the values of keys and values,
    and prompts take minutes in some of its formats.
    """

    def __init__(self, path: Path, threads: int, flash_attention: bool, bf16_keys: bool = False) -> None:
        import llama_cpp

        self.api = llama_cpp
        quiet = llama_cpp.llama_log_callback(lambda *_: None)
        self.quiet = quiet
        llama_cpp.llama_log_set(quiet, None)
        parameters = llama_cpp.llama_model_default_params()
        parameters.use_mmap = True
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), parameters)
        variant = "-flash" * flash_attention + "-bf16" * bf16_keys
        self.states = path.with_name(f"{path.stem.split('-')[0]}-state{variant}")
        self.threads = threads
        self.flash = 1 if flash_attention else 0
        self.key_type = (QuantFormat.BF16 if bf16_keys else QuantFormat.F16).ggml_type

    def context(self, length: int, sequences: int) -> object:
        parameters = self.api.llama_context_default_params()
        parameters.n_ctx = (length + 64) * sequences
        parameters.n_batch = parameters.n_ubatch = 512
        parameters.n_seq_max = sequences
        parameters.n_threads = parameters.n_threads_batch = self.threads
        parameters.flash_attn_type = self.flash
        parameters.type_k = self.key_type
        return self.api.llama_init_from_model(self.model, parameters)

    def run(self, context: object, sequences: range, queries: int, position: int) -> None:
        api = self.api
        tokens = len(sequences) * queries
        batch = api.llama_batch_init(tokens, 0, 1)
        batch.n_tokens = tokens
        for s, sequence in enumerate(sequences):
            for q in range(queries):
                i = s * queries + q
                batch.token[i] = (i * 7919 + 13) % 32000  # the smallest vocabulary
                batch.pos[i] = position + q
                batch.n_seq_id[i] = 1
                batch.seq_id[i][0] = sequence
                batch.logits[i] = q == queries - 1
        status = api.llama_decode(context, batch)
        if status:
            raise RuntimeError(f"llama_decode failed with {status}")
        api.llama_synchronize(context)
        api.llama_batch_free(batch)

    def seconds(self, workload: Workload) -> float:
        context = self.context(workload.context + workload.queries, workload.sequences)
        memory = self.api.llama_get_memory(context)
        if workload.context:
            self.fill(context, workload)

        def step() -> None:
            self.run(context, range(workload.sequences), workload.queries, workload.context)
            for sequence in range(workload.sequences):
                self.api.llama_memory_seq_rm(memory, sequence, workload.context, -1)

        seconds = time_repeats(step, workload.repeats)
        self.api.llama_free(context)
        return seconds

    def fill(self, context: object, workload: Workload) -> None:
        """Copy a context of this length to every sequence."""
        api, kept = self.api, self.states.with_name(f"{self.states.name}-{workload.context}")
        if not kept.exists():
            for start in range(0, workload.context, 512):
                self.run(context, range(1), min(512, workload.context - start), start)
            size = api.llama_state_seq_get_size(context, 0)
            buffer = (ctypes.c_uint8 * size)()
            api.llama_state_seq_get_data(context, buffer, size, 0)
            kept.write_bytes(bytes(buffer))
        data = kept.read_bytes()
        buffer = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
        for sequence in range(workload.sequences):
            api.llama_memory_seq_rm(api.llama_get_memory(context), sequence, -1, -1)
            if api.llama_state_seq_set_data(context, buffer, len(data), sequence) == 0:
                raise RuntimeError("llama.cpp could not restore a saved context")


class TransformersModel:
    """The workloads in bfloat16 with transformers and its dynamic cache."""

    def __init__(self, config: ModelConfig, threads: int) -> None:
        import torch
        import transformers

        torch.set_num_threads(threads)
        self.torch = torch
        self.transformers = transformers
        options = transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            max_position_embeddings=config.max_position,
            tie_word_embeddings=True,
        )
        torch.set_default_dtype(torch.bfloat16)
        model: Any = transformers.LlamaForCausalLM
        self.model = model(options).eval()
        torch.set_default_dtype(torch.float32)

    def seconds(self, workload: Workload) -> float:
        torch = self.torch
        prompt = torch.ones((workload.sequences, max(workload.context, 1)), dtype=torch.long)
        step_ids = torch.ones((workload.sequences, workload.queries), dtype=torch.long)
        cache = self.transformers.DynamicCache(config=self.model.config)
        with torch.inference_mode():
            if workload.context:
                self.model(prompt, past_key_values=cache, logits_to_keep=1)

            def step() -> None:
                self.model(step_ids, past_key_values=cache, logits_to_keep=1)
                cache.crop(workload.context)

            return time_repeats(step, workload.repeats)
