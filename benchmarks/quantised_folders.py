"""Folders of a Llama with random weights in FP8, AWQ or GPTQ."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from bifolio.config import ModelConfig

GROUP, BLOCK = 128, 128
DESCRIPTIONS: dict[str, dict[str, Any]] = {
    "fp8": {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False},
}
Tensors = dict[str, torch.Tensor]
Draw = Callable[[str, int, int], Tensors]


def drawing(method: str) -> Draw:
    """A function that draws the tensors of a matrix."""
    random = torch.Generator().manual_seed(0)

    def words(*shape: int) -> torch.Tensor:
        return torch.randint(-(2**31), 2**31 - 1, shape, generator=random, dtype=torch.int32)

    def draw(name: str, rows: int, columns: int) -> Tensors:
        if method == "fp8":
            values = torch.randn(rows, columns, generator=random) * 60
            scales = torch.full((-(-rows // BLOCK), -(-columns // BLOCK)), 0.02 / 60)
            stored = values.clamp(-448, 448).to(torch.float8_e4m3fn)
            return {f"{name}.weight": stored, f"{name}.weight_scale_inv": scales}
        groups = columns // GROUP
        return {
            f"{name}.qweight": words(columns, rows // 8) if method == "awq" else words(columns // 8, rows),
            f"{name}.qzeros": words(groups, rows // 8),
            f"{name}.scales": (torch.rand(groups, rows, generator=random) * 0.005).half(),
        }

    return draw


def write_quantised(folder: Path, config: ModelConfig, method: str) -> None:
    draw = drawing(method)
    d, ffn, q, kv = config.hidden_size, config.intermediate_size, config.query_size, config.kv_size
    shapes = {
        "self_attn.q_proj": (q, d), "self_attn.k_proj": (kv, d), "self_attn.v_proj": (kv, d),
        "self_attn.o_proj": (d, q), "mlp.gate_proj": (ffn, d), "mlp.up_proj": (ffn, d), "mlp.down_proj": (d, ffn),
    }  # fmt: skip
    tensors: Tensors = {
        "model.embed_tokens.weight": (torch.randn(config.vocab_size, d) * 0.02).bfloat16(),
        "model.norm.weight": torch.ones(d),
    }
    for layer in range(config.num_layers):
        for name, shape in shapes.items():
            tensors |= draw(f"model.layers.{layer}.{name}", *shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = torch.ones(d)
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    described = {
        "model_type": "llama", "vocab_size": config.vocab_size, "hidden_size": d, "intermediate_size": ffn,
        "num_hidden_layers": config.num_layers, "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads, "max_position_embeddings": config.max_position,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "hidden_act": "silu",
        "quantization_config": DESCRIPTIONS[method],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(described))
