"""Random low-rank adapters of a shape, in folders of PEFT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from bifolio.config import ModelConfig
from bifolio.model.adapters.layout import traced_layers
from bifolio.model.huggingface.safetensors_file import write_safetensors

RANK = 16
SIZE = 0.02  # of the random numbers


def write_adapters(folder: Path, config: ModelConfig, count: int, rank: int = RANK) -> list[Path]:
    """Adapters of every matrix of attention and of the MLPs, each with numbers of its own, in half floats."""
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in traced_layers(config, "hf"):
        for linear in (layer.qkv, layer.output, layer.up, layer.down):
            for part in linear.parts:
                module = part.name.removesuffix(".weight")
                shapes[f"base_model.model.{module}.lora_A.weight"] = (rank, part.shape[1])
                shapes[f"base_model.model.{module}.lora_B.weight"] = (part.shape[0], rank)
    largest = max(int(np.prod(shape)) for shape in shapes.values())
    numbers = (np.random.default_rng(0).random(largest + count * len(shapes), dtype=np.float32) - 0.5) * SIZE
    numbers = numbers.astype(np.float16)
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    settings["target_modules"] = sorted({name.split(".")[-3] for name in shapes})
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
