"""Tiny models for tests: by transformers for every architecture, and by numpy alone where torch has no business.

Weights are drawn wide (0.2) and norms are moved off 1, so that logits differ clearly and a forgotten factor shows.
"""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bifolio.cache.block_manager import KVCacheBlockManager
from bifolio.cache.storage import CacheLayout, KvCacheEntry, KVStorage
from bifolio.config import CacheConfig, EngineConfig, KVDtype
from bifolio.engine.engine import InferenceEngine
from bifolio.engine.executor import DecodeExecutor, ModelRunner, PrefillExecutor
from bifolio.kernels.interface import Batch, KernelSet
from bifolio.kernels.reference import ReferenceKernels
from bifolio.kernels.select import CANDIDATES, select_kernels
from bifolio.model.huggingface.hf_loader import load_folder
from bifolio.model.huggingface.safetensors_file import write_safetensors
from bifolio.model.loaded import LoadedModel
from bifolio.sampling_params import SamplingParams
from bifolio.sequence import Request, StepResult
from moe_models import MOE_ARCHITECTURES, moe_kinds, spread_choices

ARCHITECTURES = ("gpt2", "llama", "llama3-rope", "smollm2", "mistral", "qwen2", "qwen3", "gemma3", "phi3",
                 *MOE_ARCHITECTURES)  # fmt: skip
INIT_RANGE = 0.2
WINDOW = 5  # tokens; every prompt of the tests is longer


@cache
def scratch() -> Path:
    """A folder that lives as long as the process."""
    folder = Path(tempfile.mkdtemp(prefix="bifolio-tests-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def fresh_folder(name: str) -> Path:
    return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=scratch()))


# -- by transformers ------------------------------------------------------------------------------------------------


@cache
def tiny_model(architecture: str, **overrides: Any) -> tuple[Any, Path]:
    """A transformers model with random weights, and the folder that its `save_pretrained` wrote."""
    import torch
    import transformers

    torch.manual_seed(len(architecture))
    config = transformers_config(architecture, overrides)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms start at 1 and biases at 0: mistakes in either would not show
                parameter.add_(torch.randn_like(parameter) * 0.1)
        spread_choices(model)
    folder = fresh_folder(architecture)
    model.save_pretrained(folder)
    return model, folder


def transformers_config(architecture: str, overrides: dict[str, Any]) -> Any:
    import transformers as tf

    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": INIT_RANGE}
    if architecture == "gpt2":
        sizes = {"vocab_size": 97, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}
        return tf.GPT2Config(**{**sizes, **special, **overrides})
    sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}  # fmt: skip
    llama3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
              "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip
    kinds: dict[str, tuple[Any, dict[str, Any]]] = {
        "llama": (tf.LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
        "llama3-rope": (tf.LlamaConfig, {"rope_parameters": llama3}),
        "smollm2": (tf.LlamaConfig, {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72,
                                     "tie_word_embeddings": True}),
        "mistral": (tf.MistralConfig, {"sliding_window": WINDOW}),
        "qwen2": (tf.Qwen2Config, {}),
        "qwen3": (tf.Qwen3Config, {"head_dim": 24}),
        "gemma3": (tf.Gemma3TextConfig, {"head_dim": 24, "sliding_window": WINDOW, "query_pre_attn_scalar": 20,
                                         "layer_types": ("sliding_attention", "full_attention")}),
        "phi3": (tf.Phi3Config, {}),
        "olmo2": (tf.Olmo2Config, {}),
        "lfm2": (tf.Lfm2Config, {"layer_types": ("conv", "full_attention"), "block_auto_adjust_ff_dim": False}),
    }  # fmt: skip
    make, extra = {**kinds, **moe_kinds()}[architecture]
    values = {**sizes, **special, **extra, **overrides}
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    return make(**values)


def transformers_logits(model: Any, token_ids: Sequence[int]) -> np.ndarray:
    """f32[t, vocab] of one prompt."""
    import torch

    with torch.no_grad():
        ids = torch.tensor([list(token_ids)])
        return np.asarray(model(ids, attention_mask=torch.ones_like(ids)).logits[0].float().numpy())


def transformers_greedy(model: Any, token_ids: Sequence[int], count: int) -> list[int]:
    """What transformers' own `generate` continues with; no token ends it."""
    import torch

    ids = torch.tensor([list(token_ids)])
    model.generation_config.eos_token_id = None
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count)
    return [int(token) for token in out[0, len(token_ids) :]]


def likeliest_tokens(model: Any, token_ids: Sequence[int], continuation: Sequence[int]) -> list[int]:
    """The likeliest token of transformers after each beginning of a continuation, from one pass over all of it.

    It equals the continuation if and only if that is transformers' greedy one.
    """
    logits = transformers_logits(model, [*token_ids, *continuation[:-1]])
    return [int(token) for token in logits[len(token_ids) - 1 :].argmax(-1)]


def random_prompt(length: int, seed: int = 0, vocab_size: int = 97) -> list[int]:
    """Token ids above the special ones."""
    return [int(token) for token in np.random.default_rng(seed).integers(3, vocab_size, length)]


# -- by numpy -------------------------------------------------------------------------------------------------------

TINY = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 61, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def tiny_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights under Hugging Face's names for a Llama of this `config.json`."""
    rng = np.random.default_rng(seed)
    d, ffn, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    kv = d // heads * config["num_key_value_heads"]

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) * INIT_RANGE).astype(np.float32)

    def norm() -> np.ndarray:
        return (1 + 0.1 * rng.standard_normal(d)).astype(np.float32)

    tensors = {"model.embed_tokens.weight": matrix(config["vocab_size"], d), "model.norm.weight": norm()}
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = matrix(config["vocab_size"], d)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        tensors[prefix + "input_layernorm.weight"] = norm()
        tensors[prefix + "post_attention_layernorm.weight"] = norm()
        shapes = {"q": (d, d), "k": (kv, d), "v": (kv, d), "o": (d, d)}
        for name, (rows, columns) in shapes.items():
            tensors[f"{prefix}self_attn.{name}_proj.weight"] = matrix(rows, columns)
        for name, (rows, columns) in {"gate": (ffn, d), "up": (ffn, d), "down": (d, ffn)}.items():
            tensors[f"{prefix}mlp.{name}_proj.weight"] = matrix(rows, columns)
    return tensors


def tiny_folder(
    folder: Path | None = None,
    *,
    tokenizer: bool = False,
    seed: int = 0,
    chat_template: str | None = None,
    **config: Any,
) -> Path:
    """A Llama with random weights as a Hugging Face-layout folder, written without torch."""
    folder = folder or fresh_folder("tiny")
    folder.mkdir(parents=True, exist_ok=True)
    if tokenizer:
        backend = tiny_tokenizer()
        backend.save(str(folder / "tokenizer.json"))
        config = {"vocab_size": backend.get_vocab_size(), "bos_token_id": 0, "eos_token_id": 0, **config}
    values = {**TINY, **config}
    (folder / "config.json").write_text(json.dumps(values))
    write_safetensors(folder / "model.safetensors", tiny_tensors(values, seed))
    if chat_template is not None:
        special = {"eos_token": END_OF_TEXT, "chat_template": chat_template}
        (folder / "tokenizer_config.json").write_text(json.dumps(special))
    return folder


def nan_folder(**config: Any) -> Path:
    """`tiny_folder` with a tokenizer and damaged weights: every hidden state and every logit is NaN."""
    folder = tiny_folder(tokenizer=True, **config)
    tensors = tiny_tensors(json.loads((folder / "config.json").read_text()))
    tensors["model.norm.weight"] = np.full_like(tensors["model.norm.weight"], np.nan)
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


END_OF_TEXT = "<|endoftext|>"
CORPUS = (
    "Once upon a time a little fox lived in a quiet wood. The fox liked to read books about the sea.",
    "Prefill reads the prompt at once; decode writes one token after the other into pages of the cache.",
    "Grüße aus Köln, 你好, мир, and a smile 🙂: letters of more than one byte each.",
)


@cache
def tiny_tokenizer() -> Any:
    """A byte-level BPE (`tokenizers.Tokenizer`), trained on a few sentences; every text has a spelling."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def without_decoder(folder: Path) -> Path:
    """Replace the folder's tokenizer by one that loads and encodes, but that llguidance cannot read."""
    import tokenizers
    from tokenizers import decoders

    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@cache
def tiny_loaded(**config: Any) -> LoadedModel:
    """`tiny_folder`, loaded; one for each set of options."""
    return load_folder(tiny_folder(**config))


def kv_storage(
    num_layers: int,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: KVDtype = "f32",
    *,
    poison: bool = False,
    **options: Any,
) -> KVStorage:
    layout = CacheLayout(num_layers, num_blocks, block_size, num_kv_heads, head_dim, dtype, poison)
    return KVStorage(layout, **options)


# -- running --------------------------------------------------------------------------------------------------------


def cpu_kernel_names() -> list[str]:
    """The kernel sets that run here on the CPU."""
    return [name for name, candidate in CANDIDATES.items() if "cpu" in candidate.devices and not candidate.refusals()]


def kernels_of_long_runs(names: Iterable[str]) -> list[Any]:
    """These kernel sets as parameters; the reference takes long, so it is a slow test where another set is there."""
    known = list(names)
    slow = "reference" if len(known) > 1 else ""
    return [pytest.param(name, marks=[pytest.mark.slow] if name == slow else []) for name in known]


def make_kernels(name: str = "reference") -> KernelSet:
    return ReferenceKernels() if name == "reference" else select_kernels("cpu", name=name, threads=1)


def make_runner(
    model: LoadedModel,
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    kernels: KernelSet | None = None,
    poison: bool = False,
    cache_dtype: KVDtype = "f32",
) -> tuple[ModelRunner, KVCacheBlockManager]:
    """A model on a small cache; freed and untouched blocks are NaN when `poison` is set."""
    num_states = 0 if model.config.recurrent is None else 16
    cache = CacheConfig(num_blocks, block_size, cache_dtype, poison_free_blocks=poison, num_states=num_states)
    runner = ModelRunner.new(model, cache, kernels or ReferenceKernels())
    blocks = KVCacheBlockManager(num_blocks, block_size, num_states=num_states)
    if poison:
        blocks.on_free = runner.storage.poison_blocks
    return runner, blocks


def open_entry(runner: ModelRunner, blocks: KVCacheBlockManager) -> KvCacheEntry:
    """A new sequence with an empty row."""
    return KvCacheEntry.open(runner.storage, blocks)


def run_chunks(
    runner: ModelRunner, entry: KvCacheEntry, token_ids: Sequence[int], chunk_size: int, *, decode: bool = False
) -> np.ndarray:
    """f32[t, vocab]: logits of every token, computed `chunk_size` at a time through the cache."""
    executor = DecodeExecutor(runner) if decode else PrefillExecutor(runner)
    parts = []
    for start in range(0, len(token_ids), chunk_size):
        chunk = token_ids[start : start + chunk_size]
        parts.append(runner.kernels.to_host(executor.append([entry], [chunk], every_logit(executor))))
    return np.concatenate(parts)


def every_logit(executor: PrefillExecutor | DecodeExecutor) -> Callable[[Batch], Any]:
    """The executor's pass with the logits of all tokens."""

    def run(batch: Batch) -> Any:
        every = np.arange(batch.num_tokens, dtype=np.int32)
        return executor.run(replace(batch, logit_rows=executor.runner.kernels.from_host(every)))

    return run


def make_engine(
    model: LoadedModel | None = None,
    *,
    kernels: KernelSet | None = None,
    num_blocks: int = 128,
    block_size: int = 4,
    max_model_len: int = 128,
    max_num_seqs: int = 8,
    token_budget: int = 64,
    chunk_size: int = 32,
    enable_prefix_caching: bool = True,
    poison: bool = True,
    cache_dtype: KVDtype = "f32",
    draft_model: LoadedModel | None = None,
    num_states: int = 0,
    checkpoint_tokens: int | None = None,
    **options: Any,
) -> InferenceEngine:
    """An engine on the reference kernels; blocks that nobody may read are NaN."""
    cache = CacheConfig(
        num_blocks, block_size, cache_dtype, enable_prefix_caching, poison, num_states, checkpoint_tokens
    )
    config = EngineConfig(
        cache, max_model_len, max_num_seqs, token_budget=token_budget, chunk_size=chunk_size, **options
    )
    return InferenceEngine(model or tiny_loaded(), config, kernels or ReferenceKernels(), draft_model)


def steps(engine: InferenceEngine, max_steps: int = 2000) -> Iterator[list[StepResult]]:
    """What every step says, until nothing is left. An engine that does not get there is stuck."""
    for _ in range(max_steps):
        if not engine.has_work:
            return
        yield engine.step()
    raise AssertionError(f"still working after {max_steps} steps: {engine.stats()}")


def drain(engine: InferenceEngine, max_steps: int = 2000) -> int:
    """Step until nothing is left; says how many steps it took."""
    return sum(1 for _ in steps(engine, max_steps))


def run_alone(
    prompt: Sequence[int], params: SamplingParams, *, kernels: KernelSet | None = None, **options: Any
) -> Request:
    """The request, finished, on an engine of its own with nothing else on it."""
    engine = make_engine(kernels=kernels, **{"chunk_size": 512, "token_budget": 512, **options})
    request = engine.add_request("alone", prompt, params)
    drain(engine)
    return request


def output_ids(request: Request) -> list[list[int]]:
    return [list(sequence.output_token_ids) for sequence in request.sequences]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """In f64, along the last axis."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))
