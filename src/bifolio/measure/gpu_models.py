"""Models with random weights for the GPU benchmark, created on the device: no file, no copy."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bifolio.api.llm import LLM
from bifolio.cache.storage import CacheLayout
from bifolio.config import KVDtype, ModelConfig, MoeConfig, RecurrentConfig, RopeConfig, layers_of
from bifolio.engine.engine import InferenceEngine
from bifolio.kernels.interface import KernelSet
from bifolio.kernels.torch_dtypes import DTYPES
from bifolio.model.families import family_of
from bifolio.model.loaded import LoadedModel
from bifolio.model.tensor_names import assemble
from bifolio.quant.formats import QuantFormat
from bifolio.quant.tensor import QuantizedTensor

LLAMA3_ROPE = {"scaling": "llama3", "factor": 8.0, "original_max_position": 8192}


def _decoder(
    architecture: str,
    vocab: int,
    hidden: int,
    count: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    ffn: int,
    rope: RopeConfig,
    **options: Any,
) -> ModelConfig:
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=count,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=ffn,
        max_position=40960,
        ropes=(rope,),
        **options,
    )


def _delta_nets(layers: int) -> dict[str, Any]:
    """Gated delta nets of 32 heads in three of four layers."""
    attends = [layer % 4 == 3 for layer in range(layers)]
    sizes: dict[str, Any] = {
        "width": 4,
        "channels": 64 * 128,
        "heads": 32,
        "groups": 16,
        "key_size": 128,
        "value_size": 128,
    }
    return {
        "recurrent": RecurrentConfig("delta", **sizes),
        "layers": layers_of(layers, attention=attends, recurrent=[not has for has in attends]),
    }


SHAPES = {
    "llama-1b": _decoder(
        "llama", 128256, 2048, 16, 32, 8, 64, 8192,
        RopeConfig(5e5, 64, "llama3", 32.0, 8192), tie_embeddings=True,
    ),
    "qwen3-0.6b": _decoder(
        "qwen3", 151936, 1024, 28, 16, 8, 128, 3072,
        RopeConfig(1e6, 128), tie_embeddings=True, qk_norm=True, norm_eps=1e-6,
    ),
    "llama-8b": _decoder("llama", 128256, 4096, 32, 32, 8, 128, 14336, RopeConfig(5e5, 128, "llama3", 8.0, 8192)),
    "qwen3-30b-a3b": _decoder(
        "qwen3moe", 151936, 2048, 48, 32, 4, 128, 6144, RopeConfig(1e6, 128), qk_norm=True, norm_eps=1e-6,
        moe=MoeConfig(128, 8, 768, renormalise=True),
    ),
    "gpt-oss-20b": _decoder(
        "gptoss", 201088, 2880, 24, 64, 8, 64, 2880,
        RopeConfig(1.5e5, 64, "yarn", 32.0, 4096, attention_factor=1.3466, truncate=False),
        layers=layers_of(24, window=(128, None) * 12), qkv_bias=True, output_bias=True, sinks=True,
        activation="swiglu_clamped",
        moe=MoeConfig(32, 4, 2880, renormalise=True, router_bias=True, expert_bias=True),
    ),
    "qwen3.5-9b": _decoder(
        "qwen35", 248320, 4096, 32, 16, 4, 256, 12288, RopeConfig(1e7, 64), qk_norm=True, norm_eps=1e-6,
        norm_offset=1.0, attention_gate=True, **_delta_nets(32),
    ),
    "qwen3-next-half": _decoder(  # 24 of its 48 layers, so that bf16 fits
        "qwen3next", 151936, 2048, 24, 16, 2, 256, 5120, RopeConfig(1e7, 64), qk_norm=True, norm_eps=1e-6,
        norm_offset=1.0, attention_gate=True, **_delta_nets(24),
        moe=MoeConfig(512, 10, 512, renormalise=True, shared_size=512, shared_gate=True),
    ),
    "tiny": _decoder("llama", 512, 64, 2, 4, 2, 16, 192, RopeConfig(1e4, 16), tie_embeddings=True),
}  # fmt: skip
IN_BLOCKS = (SHAPES["gpt-oss-20b"].moe,)  # experts in MXFP4
BLOCK_BYTES, SCALE_EXPONENT = 17, 120  # of MXFP4; random codes times 2 ** (120 - 127) are about 1 / sqrt(2880)


def random_weights(
    shape: str, device: str, dtype: str = "bf16", seed: int = 0, num_layers: int | None = None
) -> LoadedModel:
    """A model with random weights and without a tokenizer; its speed is that of a real model of this shape."""
    config = shape_config(shape, num_layers)
    names = family_of(config).hf_names
    generator = torch.Generator(device=device).manual_seed(seed)
    experts: dict[str, torch.Tensor | QuantizedTensor] = {}  # of one layer; others copy them

    def matrix(name: str, size: tuple[int, ...]) -> torch.Tensor | QuantizedTensor:
        if ".experts." in name:
            role = name.split(".", 3)[3]
            if role not in experts:
                experts[role] = in_blocks(size) if config.moe in IN_BLOCKS else dense(size)
            return experts[role]
        return dense(size)

    def dense(size: tuple[int, ...]) -> torch.Tensor:
        values = torch.empty(size, dtype=DTYPES[dtype], device=device)
        return values.normal_(0.0, size[-1] ** -0.5, generator=generator)

    def in_blocks(size: tuple[int, ...]) -> QuantizedTensor:
        """One matrix, or a stack of equal ones."""
        rows, width = size[-2:]
        codes = np.random.default_rng(seed + len(experts)).integers(0, 256, (rows, width // 32, BLOCK_BYTES), np.uint8)
        codes[:, :, 0] = SCALE_EXPONENT
        count = math.prod(size[:-2])
        return QuantizedTensor(QuantFormat.MXFP4, np.tile(codes.reshape(rows, -1), (count, 1)), (count * rows, width))

    def vector(name: str, size: tuple[int, ...]) -> torch.Tensor:
        return torch.full(size, 0.0 if name.endswith(".bias") else 1.0, dtype=torch.float32, device=device)

    return LoadedModel(Path(f"random-{shape}"), config, weights=assemble(config, names, matrix, vector))


def shape_config(shape: str, num_layers: int | None = None) -> ModelConfig:
    config = SHAPES[shape]
    count = num_layers or config.num_layers
    if config.recurrent is not None:  # one of four layers has attention
        count = max(count, 4)
    return replace(config, num_layers=count, layers=config.layers[:count])


def weight_bytes(config: ModelConfig, sequences: int = 1) -> float:
    """Bytes of weights that a decode step reads: of the embedding only rows, of experts those that are chosen.

    The experts of each sequence are taken to be chosen at random.
    """
    embedding = 0 if config.tie_embeddings else config.vocab_size * config.hidden_size
    moe = config.moe
    if moe is None:
        return 2.0 * (config.num_parameters - embedding)
    experts = (config.num_parameters - config.num_active_parameters) / (1 - moe.top_k / moe.num_experts)
    read = 1 - (1 - moe.top_k / moe.num_experts) ** sequences
    bits = 8 * BLOCK_BYTES / 32 if config.moe in IN_BLOCKS else 16.0
    return 2.0 * (config.num_parameters - embedding - experts) + experts * read * bits / 8


def cache_bytes(config: ModelConfig, dtype: KVDtype = "bf16") -> int:
    """Bytes of keys and values of one token."""
    return CacheLayout.of_model(config, 1, 1, dtype).bytes_per_token


def state_bytes(config: ModelConfig) -> int:
    """Bytes of recurrent states that one sequence reads and writes in a decode step."""
    return 2 * CacheLayout.of_model(config, 1, 1).bytes_per_state


def prefill_operations(config: ModelConfig, lengths: np.ndarray) -> float:
    """Multiplications and additions of whole prompts, the last token's logits included."""
    matrices = config.num_active_parameters - config.vocab_size * config.hidden_size * (
        1 if config.tie_embeddings else 2
    )
    attention = 2.0 * len(config.attention_layers) * config.query_size * float((lengths.astype(np.float64) ** 2).sum())
    head = 2.0 * config.vocab_size * config.hidden_size * len(lengths)
    return 2.0 * matrices * float(lengths.sum()) + attention + head


def new_engine(
    model: LoadedModel,
    kernels: KernelSet,
    *,
    max_num_seqs: int = 256,
    max_model_len: int = 8448,
    block_size: int = 64,
    token_budget: int = 8192,
    num_blocks: int | None = None,
    deterministic: bool = False,
) -> InferenceEngine:
    """The engine of an `LLM` on these kernels; without `num_blocks`, its cache takes most of the free memory."""
    llm = LLM(
        model,
        kernels=kernels,
        block_size=block_size,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        token_budget=max(token_budget, max_num_seqs),
        chunk_size=token_budget,
        deterministic=deterministic,
        warm_up=False,  # benchmarks compile the kernels that they measure
    )
    return llm.engine
