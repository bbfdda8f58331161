"""Random low-rank adapters of a shape, in folders of PEFT."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bifolio.config import ModelConfig
from bifolio.model.adapters.layout import traced_layers
from bifolio.model.families import family_of
from bifolio.model.huggingface.safetensors_file import write_safetensors

RANK = 16
SIZE = 0.02  # of the random numbers


ENDS = ("head", "embedding", "own head", "own embedding")  # by low rank, and as matrices of their own


def write_adapters(
    folder: Path, config: ModelConfig, count: int, rank: int = RANK, ends: Sequence[str] = ()
) -> list[Path]:
    """Adapters of every matrix of attention and of the MLPs, each with numbers of its own, in half floats.

    `ends`: some of `ENDS`, which they change, too.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in traced_layers(config, "hf"):
        for linear in (layer.qkv, layer.output, layer.up, layer.down):
            for part in linear.parts:
                module = part.name.removesuffix(".weight")
                shapes[f"base_model.model.{module}.lora_A.weight"] = (rank, part.shape[1])
                shapes[f"base_model.model.{module}.lora_B.weight"] = (part.shape[0], rank)
    shapes |= _shapes_of_ends(config, rank, ends)
    largest = max(int(np.prod(shape)) for shape in shapes.values())
    numbers = (np.random.default_rng(0).random(largest + count * len(shapes), dtype=np.float32) - 0.5) * SIZE
    numbers = numbers.astype(np.float16)
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    settings["target_modules"] = sorted(
        {name.split(".lora_")[0].rpartition(".")[2] for name in shapes if ".lora_" in name}
    )
    found = []
    for number in range(count):
        tensors: dict[str, Any] = {}
        for place, (name, shape) in enumerate(shapes.items()):
            first = number * len(shapes) + place
            tensors[name] = numbers[first : first + int(np.prod(shape))].reshape(shape)
        own = folder / f"a{number}"
        own.mkdir(parents=True)
        write_safetensors(own / "adapter_model.safetensors", tensors)
        (own / "adapter_config.json").write_text(json.dumps(settings))
        found.append(own)
    return found


def _shapes_of_ends(config: ModelConfig, rank: int, ends: Sequence[str]) -> dict[str, tuple[int, ...]]:
    names, vocabulary, size = family_of(config).hf_names, config.vocab_size, config.hidden_size
    head, table = f"base_model.model.{names.head}.", f"base_model.model.{names.embedding}."
    shapes: dict[str, dict[str, tuple[int, ...]]] = {
        "head": {head + "lora_A.weight": (rank, size), head + "lora_B.weight": (vocabulary, rank)},
        "embedding": {table + "lora_embedding_A": (rank, vocabulary), table + "lora_embedding_B": (size, rank)},
        "own head": {head + "weight": (vocabulary, size)},
        "own embedding": {table + "weight": (vocabulary, size)},
    }
    return {name: shape for end in ends for name, shape in shapes[end].items()}
