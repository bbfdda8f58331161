"""Shapes of well-known models, for files with random weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bifolio.config import ModelConfig, MoeConfig, RecurrentConfig, RopeConfig, layers_of


def decoder(
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
    """The values of a config.json, in the usual order; all shapes end with token 1 and have 40,960 positions."""
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
        bos_token_id=0,
        eos_token_ids=(1,),
        **options,
    )


def delta_nets(layers: int, heads: int = 32, groups: int = 16, size: int = 128) -> dict[str, Any]:
    """Gated delta nets in three of four layers."""
    attends = [layer % 4 == 3 for layer in range(layers)]
    nets = RecurrentConfig(
        "delta",
        width=4,
        channels=(heads + 2 * groups) * size,
        heads=heads,
        groups=groups,
        key_size=size,
        value_size=size,
    )
    return {"recurrent": nets, "layers": layers_of(layers, attention=attends, recurrent=[not has for has in attends])}


QWEN3: dict[str, Any] = {"qk_norm": True, "norm_eps": 1e-6}
QWEN35: dict[str, Any] = {**QWEN3, "norm_offset": 1.0, "attention_gate": True}
EXPERTS = MoeConfig(128, 8, 768, renormalise=True)  # of Qwen3-30B-A3B
OSS_EXPERTS = MoeConfig(32, 4, 2880, renormalise=True, router_bias=True, expert_bias=True)
NEXT_EXPERTS = MoeConfig(512, 10, 512, renormalise=True, shared_size=512, shared_gate=True)
OSS_ROPE = RopeConfig(1.5e5, 64, "yarn", 32.0, 4096, attention_factor=1.3466, truncate=False)

SHAPES = {
    # for CPUs
    "S": decoder("llama", 49152, 576, 30, 9, 3, 64, 1536, RopeConfig(1e5, 64), tie_embeddings=True),  # SmolLM2-135M
    "M": decoder("llama", 128256, 2048, 16, 32, 8, 64, 8192, RopeConfig(5e5, 64), tie_embeddings=True),  # Llama-3.2-1B
    "T": decoder("llama", 32000, 2048, 22, 32, 4, 64, 5632, RopeConfig(1e4, 64), tie_embeddings=True),  # TinyLlama-1.1B
    "T4": decoder("llama", 32000, 2048, 4, 32, 4, 64, 5632, RopeConfig(1e4, 64), tie_embeddings=True),  # four layers
    "experts": decoder("qwen3moe", 151936, 2048, 8, 32, 4, 128, 6144, RopeConfig(1e6, 128), **QWEN3, moe=EXPERTS),
    "hybrid": decoder(
        "qwen35", 32768, 1024, 8, 8, 2, 256, 3584, RopeConfig(1e7, 64), **QWEN35, tie_embeddings=True,
        **delta_nets(8, 16, 8),
    ),  # Qwen3.5-4B, reduced
    # for GPUs
    "qwen3-0.6b": decoder("qwen3", 151936, 1024, 28, 16, 8, 128, 3072, RopeConfig(1e6, 128), **QWEN3,
                          tie_embeddings=True),
    "llama-1b": decoder("llama", 128256, 2048, 16, 32, 8, 64, 8192, RopeConfig(5e5, 64, "llama3", 32.0, 8192),
                        tie_embeddings=True),
    "qwen3-1.7b": decoder("qwen3", 151936, 2048, 28, 16, 8, 128, 6144, RopeConfig(1e6, 128), **QWEN3,
                          tie_embeddings=True),
    "llama-3b": decoder("llama", 128256, 3072, 28, 24, 8, 128, 8192, RopeConfig(5e5, 128, "llama3", 32.0, 8192),
                        tie_embeddings=True),
    "llama-8b": decoder("llama", 128256, 4096, 32, 32, 8, 128, 14336, RopeConfig(5e5, 128, "llama3", 8.0, 8192)),
    "qwen3-8b": decoder("qwen3", 151936, 4096, 36, 32, 8, 128, 12288, RopeConfig(1e6, 128), **QWEN3),
    "qwen3-30b-a3b": decoder("qwen3moe", 151936, 2048, 48, 32, 4, 128, 6144, RopeConfig(1e6, 128), **QWEN3,
                             moe=EXPERTS),
    "qwen3.5-9b": decoder("qwen35", 248320, 4096, 32, 16, 4, 256, 12288, RopeConfig(1e7, 64), **QWEN35,
                          **delta_nets(32)),
    "qwen3-next-half": decoder(  # 24 of its 48 layers, so that bf16 fits
        "qwen3next", 151936, 2048, 24, 16, 2, 256, 5120, RopeConfig(1e7, 64), **QWEN35, **delta_nets(24),
        moe=NEXT_EXPERTS,
    ),
    "gpt-oss-20b": decoder(
        "gptoss", 201088, 2880, 24, 64, 8, 64, 2880, OSS_ROPE, qkv_bias=True, output_bias=True, sinks=True,
        layers=layers_of(24, window=(128, None) * 12), activation="swiglu_clamped", moe=OSS_EXPERTS,
    ),
}  # fmt: skip


def tiny(config: ModelConfig) -> ModelConfig:
    """The same architecture with few small layers: its code runs, its speed means nothing."""
    moe = config.moe
    if moe is not None:
        moe = replace(moe, num_experts=4, top_k=2, expert_size=128, shared_size=128 if moe.shared_size else 0)
    layers = 4 if config.recurrent is not None else 2
    return replace(
        config,
        vocab_size=640,
        hidden_size=128,
        num_layers=layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        intermediate_size=128,
        ropes=tuple(replace(rope, rotary_dim=32) for rope in config.ropes),
        moe=moe,
        **({"layers": config.layers[:layers]} if config.recurrent is None else delta_nets(layers, 4, 2, 16)),
    )
