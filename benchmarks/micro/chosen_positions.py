"""Micro-benchmark: a network with indexers, its prompts and its decode steps (docs/models.md).

    python -m benchmarks.micro.chosen_positions [--prompt 16384] [--tokens 16] [--top-k 2048] [--layers 2] [--kv bf16]
        [--device cuda]

Two layers of the shape of GLM-5 with random weights and half its attention heads. On a CPU one thread, and the unit is
seconds of the processor, which other programs change less; on a GPU seconds, after a pass that is not counted. A decode
step is the median of `--tokens` behind the prompt.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.random_files import write_model
from bifolio import LLM, SamplingParams
from bifolio.config import ModelConfig
from bifolio.model.huggingface.config import config_from_hf

VOCABULARY = 4096
OPTIONS: dict[str, Any] = {"threads": 1, "max_num_seqs": 1, "enable_prefix_caching": False}


def network(layers: int, top_k: int) -> ModelConfig:
    return config_from_hf({
        "model_type": "glm_moe_dsa", "vocab_size": VOCABULARY, "hidden_size": 1024, "intermediate_size": 2048,
        "num_hidden_layers": layers, "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 64,
        "hidden_act": "silu", "max_position_embeddings": 202752, "rms_norm_eps": 1e-5, "kv_lora_rank": 512,
        "q_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 192, "qk_head_dim": 256, "v_head_dim": 256,
        "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}, "rope_interleave": True, "n_routed_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 512, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
        "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1, "moe_layer_freq": 1, "attention_bias": False, "index_head_dim": 128,
        "index_n_heads": 32, "index_topk": top_k, "indexer_types": ["full"] * layers, "indexer_rope_interleave": True,
        "tie_word_embeddings": False, "eos_token_id": [1],
    })  # fmt: skip


def seconds(llm: LLM, length: int, tokens: int, clock: Callable[[], float]) -> tuple[float, float]:
    """Seconds of a prompt, and the median of the decode steps behind it."""
    engine, prompt = llm.engine, np.random.default_rng(length).integers(10, VOCABULARY, length).tolist()
    params = SamplingParams(temperature=0, max_tokens=tokens + 1, ignore_eos=True, detokenize=False)
    engine.add_request(f"r{length}", prompt, params)
    steps, sampled = [], []
    while engine.has_work:
        started = clock()
        results = engine.step()
        steps.append(clock() - started)
        sampled.append(any(result.token is not None for result in results))
    first = sampled.index(True) + 1
    return sum(steps[:first]), statistics.median(steps[first:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, nargs="+", default=[16384])
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--top-k", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--kv", default="bf16")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        write_model(path, network(args.layers, args.top_k), "bf16")
        longest = max(args.prompt) + args.tokens + 1
        llm = LLM(path, max_model_len=longest, kv_cache_dtype=args.kv, device=args.device, **OPTIONS)
        on_gpu = args.device == "cuda"
        clock = time.perf_counter if on_gpu else time.process_time
        for length in args.prompt:
            if on_gpu:
                seconds(llm, length, args.tokens, clock)
            prompt, step = seconds(llm, length, args.tokens, clock)
            rate = f"{length / prompt:8.1f} tok/s of the prompt"
            print(f"{length:6} tokens  {rate}  {1e3 * step:8.2f} ms for a decode step", flush=True)


if __name__ == "__main__":
    main()
