"""The table of sizes in docs/deploy.md, from the shapes of well-known models and the engine's memory plan.

python scripts/sizes_table.py      # writes the part between the two marks
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bifolio.config import KVDtype, ModelConfig
from bifolio.engine.memory import plan_memory, show_bytes
from bifolio.model.huggingface.config import config_from_hf

PAGE = Path(__file__).resolve().parents[1] / "docs" / "deploy.md"
START, END = "<!-- sizes: scripts/sizes_table.py writes this part -->", "<!-- end of sizes -->"
SEQUENCES, LENGTH = 16, 4096
LLAMA = {"model_type": "llama", "rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 500000.0}
QWEN = {**LLAMA, "model_type": "qwen3", "rms_norm_eps": 1e-6, "rope_theta": 1000000.0}
EXPERTS = {
    "model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
# name: family, vocabulary, hidden size, layers, heads, key/value heads, size of a head, MLP, tied embeddings
SHAPES: dict[str, tuple[dict[str, Any], int, int, int, int, int, int, int, bool]] = {
    "SmolLM2-135M": (LLAMA, 49152, 576, 30, 9, 3, 64, 1536, True),
    "Qwen3-0.6B": (QWEN, 151936, 1024, 28, 16, 8, 128, 3072, True),
    "Llama-3.2-1B": (LLAMA, 128256, 2048, 16, 32, 8, 64, 8192, True),
    "Qwen3-4B": (QWEN, 151936, 2560, 36, 32, 8, 128, 9728, True),
    "Llama-3.1-8B": (LLAMA, 128256, 4096, 32, 32, 8, 128, 14336, False),
    "Qwen3-30B-A3B": ({**QWEN, **EXPERTS}, 151936, 2048, 48, 32, 4, 128, 6144, False),
    "Llama-3.3-70B": (LLAMA, 128256, 8192, 80, 64, 8, 128, 28672, False),
}
FORMATS = {"bf16": 16.0, "q8_0": 8.5, "q4_0": 4.5}


def config_of(name: str) -> ModelConfig:
    family, vocab, hidden, layers, heads, kv_heads, head_dim, mlp, tied = SHAPES[name]
    return config_from_hf(
        {
            **family,
            "vocab_size": vocab,
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "intermediate_size": mlp,
            "max_position_embeddings": 40960,
            "tie_word_embeddings": tied,
        }
    )


def weight_bytes(config: ModelConfig, bits: float) -> int:
    """Bytes of the weights; embedding and head keep at least 8 bits, as `bifolio quantize` writes them."""
    tables = config.vocab_size * config.hidden_size * (1 if config.tie_embeddings else 2)
    return int((config.num_parameters - tables) * bits / 8 + tables * max(bits, 8.5) / 8)


def row(name: str) -> str:
    config = config_of(name)
    weights = {format_: weight_bytes(config, bits) for format_, bits in FORMATS.items()}

    def plan(dtype: KVDtype) -> Any:
        blocks = SEQUENCES * LENGTH // 16 + 1
        return plan_memory(config, 0, kv_dtype=dtype, num_blocks=blocks, max_model_len=LENGTH, free_bytes=1 << 50)

    cells = [
        name,
        *(show_bytes(value) for value in weights.values()),
        *(show_bytes(plan(dtype).bytes_per_token) for dtype in ("f16", "q8_0")),
        *(show_bytes(plan(dtype).cache_bytes) for dtype in ("f16", "q8_0")),
    ]
    return "| " + " | ".join(cells) + " |"


def table() -> str:
    head = [
        "model", *(f"weights, {name}" for name in FORMATS), "KV per token, f16", "q8_0",
        f"cache of {SEQUENCES} x {LENGTH} tokens, f16", "q8_0",
    ]  # fmt: skip
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1), *map(row, SHAPES)]
    return "\n".join(lines)


def written(page: str) -> str:
    """The page with the table of this code."""
    before, _, rest = page.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n\n{table()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
