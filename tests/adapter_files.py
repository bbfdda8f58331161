"""Low-rank adapters for tests: by PEFT, and by numpy and the gguf package alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from bifolio.model.huggingface.safetensors_file import write_safetensors
from helpers import fresh_folder

LINEARS = ("q", "k", "v", "o")


def peft_adapter(model: Any, seed: int = 0, **config: Any) -> tuple[Any, Path]:
    """The model of transformers with a random adapter, and the folder that PEFT wrote of it."""
    import copy

    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    adapted = get_peft_model(copy.deepcopy(model), LoraConfig(**{"r": 4, "lora_alpha": 10, **config})).eval()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.15)
    folder = fresh_folder("adapter")
    adapted.save_pretrained(folder)
    return adapted, folder


def sizes_of(folder: Path) -> dict[str, tuple[int, int]]:
    """Rows and columns of the matrices of a layer of `helpers.tiny_folder`, by the names of their modules."""
    config = json.loads((folder / "config.json").read_text())
    d, ffn = config["hidden_size"], config["intermediate_size"]
    kv = d // config["num_attention_heads"] * config["num_key_value_heads"]
    rows = {"self_attn.q_proj": (d, d), "self_attn.k_proj": (kv, d), "self_attn.v_proj": (kv, d)}
    rows |= {"self_attn.o_proj": (d, d), "mlp.gate_proj": (ffn, d), "mlp.up_proj": (ffn, d), "mlp.down_proj": (d, ffn)}
    return rows


def adapter_tensors(base: Path, rank: int = 4, seed: int = 0, size: float = 0.3) -> dict[str, np.ndarray]:
    """Random changes of all matrices of a tiny Llama, under PEFT's names."""
    rng = np.random.default_rng(seed)
    layers = json.loads((base / "config.json").read_text())["num_hidden_layers"]
    tensors = {}
    for layer in range(layers):
        for module, (rows, columns) in sizes_of(base).items():
            name = f"base_model.model.model.layers.{layer}.{module}.lora_"
            tensors[name + "A.weight"] = (rng.standard_normal((rank, columns)) * size).astype(np.float32)
            tensors[name + "B.weight"] = (rng.standard_normal((rows, rank)) * size).astype(np.float32)
    return tensors


def adapter_folder(
    base: Path,
    folder: Path | None = None,
    *,
    rank: int = 4,
    seed: int = 0,
    tensors: dict[str, np.ndarray] | None = None,
    **config: Any,
) -> Path:
    """An adapter of a tiny Llama in PEFT's layout, written without PEFT."""
    folder = folder or fresh_folder("adapter")
    folder.mkdir(parents=True, exist_ok=True)
    targets = [module.rpartition(".")[2] for module in sizes_of(base)]
    values = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": targets, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**values, **config}))
    write_safetensors(
        folder / "adapter_model.safetensors", adapter_tensors(base, rank, seed) if tensors is None else tensors
    )
    return folder


def gguf_adapter(
    path: Path, tensors: dict[str, np.ndarray], *, alpha: float = 8.0, architecture: str = "llama", **metadata: str
) -> Path:
    """A file as llama.cpp's converter of adapters writes it."""
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    writer.add_string("general.type", metadata.get("type", "adapter"))
    writer.add_string("adapter.type", metadata.get("form", "lora"))
    writer.add_float32("adapter.lora.alpha", alpha)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def end_folder(base: Path, *kinds: str, seed: int = 0, rank: int = 4, **changed: Any) -> Path:
    """An adapter of a tiny Llama that also changes its ends: "head", "table" by low rank; "own head", "own table"."""
    config = json.loads((base / "config.json").read_text())
    vocabulary, d = config["vocab_size"], config["hidden_size"]
    rng = np.random.default_rng(100 + seed)

    def random(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * 0.3).astype(np.float32)

    found: dict[str, np.ndarray] = {}
    for kind in kinds:
        name = "base_model.model." + ("lm_head" if "head" in kind else "model.embed_tokens")
        if kind.startswith("own "):
            found[name + ".weight"] = random(vocabulary, d)
        elif kind == "head":
            found |= {name + ".lora_A.weight": random(rank, d), name + ".lora_B.weight": random(vocabulary, rank)}
        else:
            found |= {name + ".lora_embedding_A": random(rank, vocabulary), name + ".lora_embedding_B": random(d, rank)}
    modules = {"own head": "lm_head", "own table": "embed_tokens"}
    targets = [module.rpartition(".")[2] for module in sizes_of(base)] + ["lm_head", "embed_tokens"]
    values = {"target_modules": targets, "modules_to_save": [modules[kind] for kind in kinds if kind in modules]}
    tensors = adapter_tensors(base, rank, seed) | found | changed.pop("tensors", {})
    return adapter_folder(base, rank=rank, seed=seed, tensors=tensors, **{**values, **changed})
