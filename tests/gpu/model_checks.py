"""Whole models against transformers on the same device: logits, and tokens of a greedy run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from check_bench import relative_error

from bifolio.cache.storage import KvCacheEntry
from bifolio.config import ModelConfig
from bifolio.kernels.interface import Batch, KernelSet
from bifolio.kernels.torch_dtypes import DTYPES
from bifolio.model.families import family_of
from bifolio.model.loaded import LoadedModel
from bifolio.model.tensor_names import HF_LLAMA, assemble
from gpu_models import greedy, new_engine, shape_config

LOGIT_TOLERANCE = {"bf16": 2e-2, "f32": 1e-4}


@dataclass(frozen=True, slots=True)
class ModelCheck:
    """How far we are from transformers."""

    dtype: str
    prefill_error: float  # relative, of the logits of a whole prompt, against transformers in the same dtype
    exact_error: float  # the same against transformers with the same weights in f32
    peer_error: float  # transformers' own in this dtype against f32
    chunked_error: float  # the same prompt in chunks, the last tokens one by one
    equal_tokens: int  # leading tokens of a greedy run that agree
    num_tokens: int

    @property
    def passed(self) -> bool:
        """In f32: equal to transformers, token for token. In 16 bits both round on their way, each in its own places:

        the distance from f32 must be small, and the two no farther apart than their roundings explain.
        """
        if self.dtype == "f32":
            equal = self.equal_tokens == self.num_tokens
            return equal and max(self.prefill_error, self.chunked_error) < LOGIT_TOLERANCE["f32"]
        apart = max(self.prefill_error, self.chunked_error)
        return self.exact_error < LOGIT_TOLERANCE[self.dtype] and apart < self.exact_error + self.peer_error


def transformers_model(config: ModelConfig, dtype: torch.dtype, device: str) -> Any:
    """A transformers model of this shape, its weights drawn on the device."""
    import transformers

    rope = config.ropes[0]
    options: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": rope.theta}
    if rope.scaling == "llama3":
        parameters |= {
            "rope_type": "llama3",
            "factor": rope.factor,
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_position,
        }
    name = family_of(config).hf_class.removesuffix("ForCausalLM")
    settings = getattr(transformers, f"{name}Config")(**options, rope_parameters=parameters)
    settings._attn_implementation = "sdpa"
    with torch.device(device):
        model = getattr(transformers, f"{name}ForCausalLM")(settings).eval()
    frequencies = {key: value.clone() for key, value in model.model.rotary_emb.named_buffers()}
    model.to(dtype)
    for key, value in frequencies.items():  # a model that is loaded keeps them in f32
        model.model.rotary_emb.register_buffer(key, value, persistent=False)
    with torch.no_grad():
        for key, value in model.named_parameters():  # far from the small numbers a fresh model has
            value.normal_(1.0 if "norm" in key else 0.0, 0.1 if "norm" in key else value.shape[-1] ** -0.5)
    return model


def check_model(kernels: KernelSet, shape: str, num_prompt: int = 200, num_new: int = 64) -> ModelCheck:
    """Compare logits of a prompt, whole and in chunks, and a greedy run; weights are transformers' own."""
    config, dtype = shape_config(shape), kernels.kv_dtype
    theirs = transformers_model(config, DTYPES[dtype], kernels.device)
    tensors = dict(theirs.state_dict())
    model = LoadedModel(
        Path(shape),
        config,
        weights=assemble(config, HF_LLAMA, lambda name, size: tensors[name], lambda name, size: tensors[name].float()),
    )
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, num_prompt).tolist()
    ids = torch.tensor([tokens], device=kernels.device)
    with torch.no_grad():
        expected = theirs(ids).logits[0].float()
        written = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_new, do_sample=False, pad_token_id=0
        )[0, num_prompt:].tolist()
    sizes = {"max_num_seqs": 4, "max_model_len": 512, "block_size": 16, "num_blocks": 160}
    engine = new_engine(model, kernels, **sizes, deterministic=kernels.deterministic)
    logits = _logits(engine, tokens, [num_prompt])
    whole = relative_error(logits, expected)
    chunked = relative_error(_logits(engine, tokens, _cut(num_prompt)), expected)
    request = engine.add_request("greedy", tokens, greedy(num_new))
    while engine.has_work:
        engine.step()
    ours = request.sequences[0].output_token_ids
    equal = next((i for i, (a, b) in enumerate(zip(ours, written, strict=True)) if a != b), num_new)
    if dtype == "f32":
        return ModelCheck(dtype, whole, whole, 0.0, chunked, equal, num_new)
    with torch.no_grad():
        exact = theirs.float()(ids).logits[0]
    return ModelCheck(
        dtype, whole, relative_error(logits, exact), relative_error(expected, exact), chunked, equal, num_new
    )


def _cut(length: int) -> list[int]:
    """Chunks of a prompt: long ones, a single token between them, and the last nine tokens one by one."""
    first, rest = length * 9 // 20, length - 10 - length * 9 // 20
    return [first, 1, rest * 2 // 3, rest - rest * 2 // 3, *[1] * 9]


def _logits(engine: Any, tokens: list[int], chunks: list[int]) -> torch.Tensor:
    """f32[t, vocab] of all tokens, chunk by chunk through a cache entry of its own."""
    entry = KvCacheEntry.open(engine.runner.storage, engine.blocks)
    parts, start = [], 0
    for count in chunks:
        executor = engine.decode_executor if count == 1 else engine.prefill_executor

        def run(batch: Batch, executor: Any = executor) -> Any:
            return executor.run(replace(batch, logit_rows=None)).clone()

        parts.append(executor.append([entry], [tokens[start : start + count]], run))
        start += count
    entry.close()
    return torch.cat(parts)
