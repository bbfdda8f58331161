"""Draft heads with random weights, and a model that predicts them in torch, from the published descriptions."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from bifolio import LLM, SamplingParams, SpeculativeConfig
from bifolio.model.huggingface.safetensors_file import write_safetensors
from helpers import INIT_RANGE, TINY, fresh_folder, tiny_folder, tiny_tensors

EAGLE = {
    **TINY, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "intermediate_size": 40,
    "draft_vocab_size": 29,
}  # fmt: skip
# of a training for `sure_target`
SHORT_RUN: dict[str, Any] = {
    "steps": 60, "batch_size": 8, "context": 24, "sequences": 100, "depth": 2, "learning_rate": 1e-2, "threads": 1,
}  # fmt: skip


@cache
def sure_target() -> Path:
    """A model that is sure of its next token, so that its text can be learned in a few steps."""
    folder, tensors = tiny_folder(seed=2), tiny_tensors(TINY, seed=2)
    write_safetensors(folder / "model.safetensors", {**tensors, "lm_head.weight": tensors["lm_head.weight"] * 8})
    return folder


def accepted(model: Path, config: SpeculativeConfig) -> float:
    """Share of accepted draft tokens in other texts than those of a training, of its kind."""
    llm = LLM(model, device="cpu", threads=1, num_blocks=200, max_model_len=64, speculative=config)
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=24, ignore_eos=True) for i in range(1000, 1008)]
    llm.generate([[1]] * len(params), params, use_tqdm=False)
    assert llm.engine.speculator is not None
    return llm.engine.speculator.stats.acceptance_rate


def eagle_tensors(config: dict[str, Any], target_size: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights under the published names."""
    rng = np.random.default_rng(seed)
    d, ffn, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    kv, vocab, count = d // heads * config["num_key_value_heads"], config["vocab_size"], config["draft_vocab_size"]

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) * INIT_RANGE).astype(np.float32)

    def norm() -> np.ndarray:
        return (1 + 0.1 * rng.standard_normal(d)).astype(np.float32)

    ids = np.sort(rng.choice(vocab, count, replace=False))
    known = np.zeros(vocab, np.bool_)
    known[ids] = True
    shapes = {"q": (d, 2 * d), "k": (kv, 2 * d), "v": (kv, 2 * d), "o": (d, d)}
    mlp = {"gate": (ffn, d), "up": (ffn, d), "down": (d, ffn)}
    return {
        "fc.weight": matrix(d, 3 * target_size),
        "norm.weight": norm(),
        "lm_head.weight": matrix(count, d),
        "midlayer.input_layernorm.weight": norm(),
        "midlayer.hidden_norm.weight": norm(),
        "midlayer.post_attention_layernorm.weight": norm(),
        **{f"midlayer.self_attn.{name}_proj.weight": matrix(*shape) for name, shape in shapes.items()},
        **{f"midlayer.mlp.{name}_proj.weight": matrix(*shape) for name, shape in mlp.items()},
        "d2t": ids - np.arange(count),
        "t2d": known,
    }


def eagle_folder(seed: int = 0, taps: tuple[int, ...] | None = (0, 1, 2), **changes: Any) -> Path:
    """A head for `tiny_folder`; `taps` count layers of the target, None: as where the configuration names none."""
    config = {**EAGLE, **changes}
    if taps is not None:
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in taps]}
    folder = fresh_folder("eagle")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    size = config.get("target_hidden_size", config["hidden_size"])
    write_safetensors(folder / "model.safetensors", eagle_tensors(config, size, seed))
    return folder


def torch_eagle(
    config: dict[str, Any],
    weights: dict[str, np.ndarray],
    embeddings: np.ndarray,  # [n, d]  of the tokens at 1..n
    states: np.ndarray,  # [n, 3 * target size]  of the positions 0..n - 1; rows of d: the head's own, from there on
    own: np.ndarray | None = None,  # [m, d]
) -> tuple[np.ndarray, np.ndarray]:
    """(logits [n + m, draft vocab], hidden states [n + m, d]) of the head on one whole sequence."""
    import torch
    import torch.nn.functional as F

    w = {name: torch.from_numpy(np.array(value)) for name, value in weights.items() if name not in ("d2t", "t2d")}
    d, heads, kv_heads = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    size, eps = d // heads, config["rms_norm_eps"]
    hidden = torch.from_numpy(states) @ w["fc.weight"].T
    if own is not None:
        hidden = torch.cat([hidden, torch.from_numpy(own)])
    n = len(hidden)

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, (d,), w[f"{name}.weight"], eps)

    layer = "midlayer."
    normed = norm(hidden, layer + "hidden_norm")
    inputs = torch.cat([norm(torch.from_numpy(embeddings), layer + "input_layernorm"), normed], dim=-1)
    residual = normed if config.get("norm_before_residual") else hidden
    q, k, v = (inputs @ w[f"{layer}self_attn.{name}_proj.weight"].T for name in "qkv")
    angles = torch.arange(n)[:, None] * config["rope_theta"] ** (-torch.arange(0, size, 2) / size)[None]
    cos, sin = (torch.cat([f(angles)] * 2, dim=-1)[:, None] for f in (torch.cos, torch.sin))

    def rotated(x: torch.Tensor) -> torch.Tensor:
        x = x.reshape(n, -1, size)
        turned = torch.cat([-x[..., size // 2 :], x[..., : size // 2]], dim=-1)
        return (x * cos + turned * sin).transpose(0, 1)

    values = v.reshape(n, kv_heads, size).transpose(0, 1)
    keys, values = (x.repeat_interleave(heads // kv_heads, dim=0) for x in (rotated(k), values))
    mixed = F.scaled_dot_product_attention(rotated(q), keys, values, is_causal=True)
    x = residual + mixed.transpose(0, 1).reshape(n, d) @ w[layer + "self_attn.o_proj.weight"].T
    y = norm(x, layer + "post_attention_layernorm")
    gate, up, down = (w[f"{layer}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    x = x + (F.silu(y @ gate.T) * (y @ up.T)) @ down.T
    return (norm(x, "norm") @ w["lm_head.weight"].T).numpy(), x.numpy()
