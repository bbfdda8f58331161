"""Small random models like jina-bert-v2, which transformers does not have: by their definition, in torch."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from encoder_models import SIZES, word_pieces

from bifolio.model.huggingface.safetensors_file import write_safetensors
from helpers import fresh_folder

HEADS, LAYERS, WIDTH, INNER = 6, 2, 48, 80
CONFIG = {
    **SIZES, "num_attention_heads": HEADS, "num_hidden_layers": LAYERS, "model_type": "bert", "type_vocab_size": 2,
    "architectures": ["JinaBertForMaskedLM"], "position_embedding_type": "alibi", "feed_forward_type": "geglu",
    "hidden_act": "gelu", "layer_norm_eps": 1e-12,
}  # fmt: skip


class JinaModel:
    """A network of random weights, with the names of tensors of the published folders."""

    def __init__(self) -> None:
        rng = np.random.default_rng(8)
        self.config = SimpleNamespace(**CONFIG)
        self.weights: dict[str, np.ndarray] = {}

        def add(name: str, *shape: int, bias: bool = True) -> None:
            self.weights[f"{name}.weight"] = 0.15 * rng.standard_normal(shape) + (len(shape) == 1)
            if bias:
                self.weights[f"{name}.bias"] = 0.2 * rng.standard_normal(shape[0])

        add("embeddings.word_embeddings", int(CONFIG["vocab_size"]), WIDTH, bias=False)
        add("embeddings.token_type_embeddings", 2, WIDTH, bias=False)
        add("embeddings.LayerNorm", WIDTH)
        for layer in (f"encoder.layer.{number}." for number in range(LAYERS)):
            for part in ("self.query", "self.key", "self.value", "output.dense"):
                add(f"{layer}attention.{part}", WIDTH, WIDTH)
            add(f"{layer}attention.output.LayerNorm", WIDTH)
            add(f"{layer}mlp.gated_layers", 2 * INNER, WIDTH, bias=False)
            add(f"{layer}mlp.wo", WIDTH, INNER)
            add(f"{layer}mlp.layernorm", WIDTH)
        self.weights = {name: value.astype(np.float32) for name, value in self.weights.items()}

    def state_dict(self) -> dict[str, Any]:
        import torch

        return {name: torch.from_numpy(value) for name, value in self.weights.items()}

    def states(self, ids: list[int]) -> np.ndarray:
        """f32[tokens, width]: hidden states of one text."""
        import torch
        import torch.nn.functional as F

        w = {name: torch.from_numpy(value).double() for name, value in self.weights.items()}

        def linear(x: Any, name: str) -> Any:
            return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

        def norm(x: Any, name: str) -> Any:
            return F.layer_norm(x, (WIDTH,), w[f"{name}.weight"], w[f"{name}.bias"], 1e-12)

        first = [2.0 ** (-2.0 * n) for n in range(1, 5)]  # of the largest power of 2 in the number of heads
        slopes = torch.tensor([*first, *(2.0**-1.0, 2.0**-3.0)], dtype=torch.float64)
        places = torch.arange(len(ids))
        biases = -slopes[:, None, None] * (places[None, :] - places[:, None]).abs()
        x = w["embeddings.word_embeddings.weight"][ids] + w["embeddings.token_type_embeddings.weight"][0]
        x = norm(x, "embeddings.LayerNorm")
        for layer in (f"encoder.layer.{number}." for number in range(LAYERS)):
            q, k, v = (
                linear(x, f"{layer}attention.self.{part}").view(len(ids), HEADS, -1).transpose(0, 1)
                for part in ("query", "key", "value")
            )
            scores = (q @ k.transpose(1, 2)) / (WIDTH // HEADS) ** 0.5 + biases
            mixed = (scores.softmax(-1) @ v).transpose(0, 1).reshape(len(ids), -1)
            x = norm(x + linear(mixed, f"{layer}attention.output.dense"), f"{layer}attention.output.LayerNorm")
            gate, up = linear(x, f"{layer}mlp.gated_layers").chunk(2, dim=-1)
            x = norm(x + linear(F.gelu(gate) * up, f"{layer}mlp.wo"), f"{layer}mlp.layernorm")
        found: np.ndarray = x.float().numpy()
        return found


@cache
def jina_model() -> tuple[JinaModel, Path]:
    model, folder = JinaModel(), fresh_folder("jina")
    write_safetensors(folder / "model.safetensors", model.weights)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    word_pieces().save(str(folder / "tokenizer.json"))
    return model, folder
