"""RWKV-7 by the formulas of its paper (arXiv 2503.14456), token by token in f64, and small models with random weights.

The state of a head is S of [values, keys], and a token gives

    S <- S (diag(w) - k^T (a * k)) + v^T k~,    y = S r

with removed keys k of length 1, added keys k~, decays w and rates a. Nothing here is shared with the package.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from bifolio.model.huggingface.safetensors_file import write_safetensors

Tensors = dict[str, np.ndarray]
SIZES: dict[str, Any] = {
    "model_type": "rwkv7", "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 3, "head_dim": 8,
    "intermediate_size": 56, "decay_low_rank_dim": 6, "gate_low_rank_dim": 10, "a_low_rank_dim": 5,
    "v_low_rank_dim": 4, "norm_eps": 8e-5, "max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip


def random_tensors(config: dict[str, Any] = SIZES, seed: int = 0) -> Tensors:
    """Weights by their names in a folder, in the ranges of trained models: slow and fast decays, all gates in use."""
    rng, d, ffn = np.random.default_rng(seed), config["hidden_size"], config["intermediate_size"]
    ranks = {"w": "decay_low_rank_dim", "a": "a_low_rank_dim", "g": "gate_low_rank_dim", "v": "v_low_rank_dim"}

    def normal(*shape: int, scale: float = 1.0, mean: float = 0.0) -> np.ndarray:
        return (mean + scale * rng.standard_normal(shape)).astype(np.float32)

    def norm(name: str) -> Tensors:
        return {f"{name}.weight": normal(d, scale=0.2, mean=1.0), f"{name}.bias": normal(d, scale=0.2)}

    found = {"model.embeddings.weight": normal(config["vocab_size"], d), **norm("model.norm")}
    found["lm_head.weight"] = normal(config["vocab_size"], d, scale=d**-0.5)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        found |= norm(prefix + "pre_norm") if layer == 0 else {}
        found |= norm(prefix + "attn_norm") | norm(prefix + "ffn_norm") | norm(prefix + "attn.g_norm")
        for name in "rwkvag":
            found[f"{prefix}attn.x_{name}"] = rng.uniform(0, 1, (1, 1, d)).astype(np.float32)
        for name in "rkvo":
            found[f"{prefix}attn.{name}_proj.weight"] = normal(d, d, scale=d**-0.5)
        for name, key in ranks.items():
            if name == "v" and layer == 0:
                continue
            product, rank = f"{prefix}attn.{name}_lora.lora", config[key]
            found[f"{product}.0.weight"] = normal(rank, d, scale=d**-0.5)
            found[f"{product}.2.weight"] = normal(d, rank, scale=rank**-0.5)
            if name != "g":
                found[f"{product}.2.bias"] = normal(d)
        found[f"{prefix}attn.k_k"], found[f"{prefix}attn.k_a"] = normal(d, mean=0.7), normal(d, mean=1.0, scale=0.3)
        found[f"{prefix}attn.r_k"] = normal(d // config["head_dim"], config["head_dim"], scale=0.3)
        found[f"{prefix}ffn.x_k"] = rng.uniform(0, 1, d).astype(np.float32)
        found[f"{prefix}ffn.key.weight"] = normal(ffn, d, scale=d**-0.5)
        found[f"{prefix}ffn.value.weight"] = normal(d, ffn, scale=ffn**-0.5)
    return found


def write_model(folder: Path, config: dict[str, Any] = SIZES, seed: int = 0, **changes: Any) -> Tensors:
    """A folder of a small model, and its tensors."""
    tensors = random_tensors(config, seed)
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return tensors


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


class Oracle:
    """One sequence, which grows token by token."""

    def __init__(self, tensors: Tensors, config: dict[str, Any] = SIZES) -> None:
        self.tensors = {name: value.astype(np.float64) for name, value in tensors.items()}
        self.layers, self.size, self.eps = config["num_hidden_layers"], config["head_dim"], config["norm_eps"]
        d, self.heads = config["hidden_size"], config["hidden_size"] // self.size
        self.states = np.zeros((self.layers, self.heads, self.size, self.size))
        self.before = np.zeros((self.layers, 2, d))  # the last inputs of the two parts of a layer

    def logits(self, token: int) -> np.ndarray:
        """The logits behind one token more."""
        x = self.norm(self.tensors["model.embeddings.weight"][token], "model.layers.0.pre_norm")
        first = np.zeros(0)
        for layer in range(self.layers):
            name = f"model.layers.{layer}."
            mixed, first = self.time_mix(layer, self.norm(x, name + "attn_norm"), first)
            x = x + mixed
            x = x + self.channel_mix(layer, self.norm(x, name + "ffn_norm"))
        return self.tensors["lm_head.weight"] @ self.norm(x, "model.norm")

    def all_logits(self, tokens: list[int]) -> np.ndarray:
        return np.stack([self.logits(token) for token in tokens])

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        y = (x - x.mean()) / np.sqrt(x.var() + self.eps)
        return y * self.tensors[name + ".weight"] + self.tensors[name + ".bias"]

    def time_mix(self, layer: int, x: np.ndarray, first: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        t, name = self.tensors, f"model.layers.{layer}.attn."
        mixed = {key: x + (self.before[layer, 0] - x) * t[f"{name}x_{key}"].reshape(-1) for key in "rwkvag"}
        self.before[layer, 0] = x

        def low_rank(key: str, activate: Any) -> np.ndarray:
            own = f"{name}{key}_lora.lora"
            out = t[f"{own}.2.weight"] @ activate(t[f"{own}.0.weight"] @ mixed[key])
            return out + t.get(f"{own}.2.bias", 0.0)

        r, k, v = (t[f"{name}{key}_proj.weight"] @ mixed[key] for key in "rkv")
        w = np.exp(-np.exp(-0.5) * sigmoid(low_rank("w", np.tanh)))
        a, g = sigmoid(low_rank("a", lambda y: y)), low_rank("g", sigmoid)
        if layer == 0:
            first = v
        else:
            v = v + (first - v) * sigmoid(low_rank("v", lambda y: y))
        removed, added = k * t[name + "k_k"], k * (1 + (a - 1) * t[name + "k_a"])
        out = np.empty_like(x)
        for head in range(self.heads):
            own = slice(head * self.size, (head + 1) * self.size)
            u = removed[own] / np.linalg.norm(removed[own])
            change = np.diag(w[own]) - np.outer(u, a[own] * u)
            self.states[layer, head] = self.states[layer, head] @ change + np.outer(v[own], added[own])
            y = self.states[layer, head] @ r[own]
            y = (y - y.mean()) / np.sqrt(y.var() + self.size * self.eps)
            y = y * t[name + "g_norm.weight"][own] + t[name + "g_norm.bias"][own]
            out[own] = y + (r[own] * t[name + "r_k"][head] * added[own]).sum() * v[own]
        return t[name + "o_proj.weight"] @ (out * g), first

    def channel_mix(self, layer: int, x: np.ndarray) -> np.ndarray:
        name = f"model.layers.{layer}.ffn."
        mixed = x + (self.before[layer, 1] - x) * self.tensors[name + "x_k"]
        self.before[layer, 1] = x
        return self.tensors[name + "value.weight"] @ np.maximum(self.tensors[name + "key.weight"] @ mixed, 0) ** 2
