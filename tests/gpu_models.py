"""Models of the benchmarks' shapes with random weights in memory, created on the device: no file, no copy."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.shapes import SHAPES, decoder
from bifolio.api.llm import LLM
from bifolio.config import ModelConfig, RopeConfig
from bifolio.engine.engine import InferenceEngine
from bifolio.kernels.interface import KernelSet
from bifolio.kernels.torch_dtypes import DTYPES
from bifolio.model.families import family_of
from bifolio.model.loaded import LoadedModel
from bifolio.model.tensor_names import assemble
from bifolio.sampling_params import SamplingParams

TINY = decoder("llama", 512, 64, 2, 4, 2, 16, 192, RopeConfig(1e4, 16), tie_embeddings=True)


def shape_config(name: str) -> ModelConfig:
    return TINY if name == "tiny" else SHAPES[name]


def random_weights(config: ModelConfig, device: str, dtype: str = "bf16") -> LoadedModel:
    """A model without a tokenizer."""
    generator = torch.Generator(device=device).manual_seed(0)

    def matrix(name: str, size: tuple[int, ...]) -> torch.Tensor:
        values = torch.empty(size, dtype=DTYPES[dtype], device=device)
        return values.normal_(0.0, size[-1] ** -0.5, generator=generator)

    def vector(name: str, size: tuple[int, ...]) -> torch.Tensor:
        return torch.full(size, 0.0 if name.endswith(".bias") else 1.0, dtype=torch.float32, device=device)

    weights = assemble(config, family_of(config).hf_names, matrix, vector)
    return LoadedModel(Path("random"), config, weights=weights)


def new_engine(
    model: LoadedModel,
    kernels: KernelSet,
    *,
    max_num_seqs: int,
    max_model_len: int,
    block_size: int,
    num_blocks: int,
    deterministic: bool = False,
) -> InferenceEngine:
    """The engine of an `LLM` on these kernels."""
    return LLM(
        model,
        kernels=kernels,
        block_size=block_size,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        token_budget=8192,
        chunk_size=8192,
        deterministic=deterministic,
        warm_up=False,
    ).engine


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
