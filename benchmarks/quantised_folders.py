"""Time to the first tokens and peak memory with a folder in FP8, AWQ or GPTQ: random weights, shape of TinyLlama-1.1B.

    python benchmarks/quantised_folders.py --methods fp8,awq,gptq --rounds 3

Every start is a process of its own; the file lies in the page cache.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import safetensors.torch
import torch
from native_models import model_config

GROUP, BLOCK = 128, 128
DESCRIPTIONS: dict[str, dict[str, Any]] = {
    "fp8": {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False},
}
START = """
import sys, time
begin = time.perf_counter()
from bifolio import LLM, SamplingParams
llm = LLM(sys.argv[1], max_model_len=512, num_blocks=40, device=sys.argv[2])
llm.generate([[1, 2, 3, 4]], SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
seconds = time.perf_counter() - begin
peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))  # kB, since exec
print(seconds, int(peak) / 1024)
"""
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


def write(folder: Path, method: str) -> None:
    config, draw = model_config("T"), drawing(method)
    d, ffn, kv = config.hidden_size, config.intermediate_size, config.num_kv_heads * config.head_dim
    shapes = {
        "self_attn.q_proj": (d, d), "self_attn.k_proj": (kv, d), "self_attn.v_proj": (kv, d),
        "self_attn.o_proj": (d, d), "mlp.gate_proj": (ffn, d), "mlp.up_proj": (ffn, d), "mlp.down_proj": (d, ffn),
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
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    described = {
        "model_type": "llama", "vocab_size": config.vocab_size, "hidden_size": d, "intermediate_size": ffn,
        "num_hidden_layers": config.num_layers, "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads, "max_position_embeddings": config.max_position,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "hidden_act": "silu",
        "quantization_config": DESCRIPTIONS[method],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(described))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--methods", default=",".join(DESCRIPTIONS), help=f"of {', '.join(DESCRIPTIONS)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args()
    for method in arguments.methods.split(","):
        with tempfile.TemporaryDirectory() as found:
            folder = Path(found)
            write(folder, method)
            size = (folder / "model.safetensors").stat().st_size
            command = [sys.executable, "-c", START, found, arguments.device]
            runs = [
                [
                    float(text)
                    for text in subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
                ]
                for _ in range(arguments.rounds)
            ]
        seconds, peak = (median(column) for column in zip(*runs, strict=True))
        print(f"{method}: file {size / 1e6:.0f} MB, first tokens after {seconds:.2f} s, peak {peak:.0f} MB")


if __name__ == "__main__":
    main()
