"""A model with experts on this CPU, in bifolio and llama.cpp, in turns: prefill, one sequence, 16 sequences.

    python benchmarks/experts_cpu.py --formats q4_0,q4_k --threads 2 --rounds 5
    python benchmarks/experts_cpu.py --formats q4_0 --threads 1 --clock processor

The model has the shape of Qwen3-30B-A3B with fewer layers and random weights. Each engine runs in a process of its own;
they alternate, round by round. The table shows the best round of each, and for one sequence of bifolio the bytes of
weights that a token reads, over the read bandwidth of the machine.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from k_quants import CLOCKS, ENGINES, SPEEDS, Worker
from native_models import random_tensor

from bifolio.quant.formats import QuantFormat

VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 151936, 2048, 32, 4, 128
EXPERTS, TOP_K, EXPERT_SIZE = 128, 8, 768


def matrices(layers: int) -> dict[str, tuple[int, ...]]:
    """Quantised matrices by GGUF name; those of experts are [experts, out, in]."""
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (VOCAB, HIDDEN), "output": (VOCAB, HIDDEN)}
    for i in range(layers):
        shapes |= {
            f"blk.{i}.attn_q": (HEADS * HEAD_DIM, HIDDEN),
            f"blk.{i}.attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{i}.attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{i}.attn_output": (HIDDEN, HEADS * HEAD_DIM),
            f"blk.{i}.ffn_gate_exps": (EXPERTS, EXPERT_SIZE, HIDDEN),
            f"blk.{i}.ffn_up_exps": (EXPERTS, EXPERT_SIZE, HIDDEN),
            f"blk.{i}.ffn_down_exps": (EXPERTS, HIDDEN, EXPERT_SIZE),
        }
    return shapes


def write_file(path: Path, format: QuantFormat, layers: int) -> None:
    """Write a GGUF file without a vocabulary."""
    import gguf

    writer, rng = gguf.GGUFWriter(str(path), "qwen3moe", use_temp_file=True), np.random.default_rng(0)
    writer.add_context_length(8192)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(6144)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(TOP_K)
    writer.add_expert_feed_forward_length(EXPERT_SIZE)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("no_vocab")
    kind = gguf.GGMLQuantizationType(format.ggml_type)
    for name, shape in matrices(layers).items():
        data = random_tensor(int(np.prod(shape[:-1])), shape[-1], format, rng).data
        writer.add_tensor(f"{name}.weight", data.reshape(*shape[:-1], -1), raw_dtype=kind)
    ones = np.ones(HIDDEN, np.float32)
    for i in range(layers):
        for name, size in (
            ("attn_norm", HIDDEN),
            ("ffn_norm", HIDDEN),
            ("attn_q_norm", HEAD_DIM),
            ("attn_k_norm", HEAD_DIM),
        ):
            writer.add_tensor(f"blk.{i}.{name}.weight", ones[:size])
        writer.add_tensor(
            f"blk.{i}.ffn_gate_inp.weight", rng.standard_normal((EXPERTS, HIDDEN)).astype(np.float32) * 0.02
        )
    writer.add_tensor("output_norm.weight", ones)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def active_bytes(format: QuantFormat, layers: int) -> float:
    """Bytes of weights that one token reads: its own experts, and one row of the embedding."""
    shapes = matrices(layers)
    numbers = sum(float(np.prod(s)) * (TOP_K / EXPERTS if len(s) == 3 else 1) for s in shapes.values()) - VOCAB * HIDDEN
    return numbers * format.bits_per_element / 8 + 4 * layers * EXPERTS * HIDDEN


def read_bandwidth(threads: int, clock: str) -> float:
    """Bytes per second of the clock, the best of several measurements."""
    from bifolio.kernels import native

    def measure() -> float:
        wall, own = time.perf_counter(), CLOCKS[clock]()
        rate = native.read_bandwidth()
        return float(rate * (time.perf_counter() - wall) / (CLOCKS[clock]() - own))

    native.set_num_threads(threads)
    return max(measure() for _ in range(5))


def compare(path: Path, format: QuantFormat, options: argparse.Namespace) -> None:
    speeds: dict[str, dict[str, list[float]]] = {engine: {name: [] for name in SPEEDS} for engine in options.engines}
    workers = {engine: Worker(engine, str(path), options) for engine in options.engines}
    try:
        for number in range(options.rounds):
            for name in SPEEDS:
                for engine, worker in workers.items():
                    speeds[engine][name].append(worker.speed(name, number))
    finally:
        for worker in workers.values():
            worker.close()
    bandwidth = read_bandwidth(options.threads, options.clock)
    for name in SPEEDS:
        best = {engine: max(values[name]) for engine, values in speeds.items()}
        line = "  ".join(f"{engine} {value:.2f}" for engine, value in best.items())
        ratio = f"  ratio {best[ENGINES[0]] / best[ENGINES[1]]:.2f}" if len(best) == 2 else ""
        share = active_bytes(format, options.layers) * best.get(ENGINES[0], 0.0) / bandwidth
        print(
            f"{format.name} {name}: {line} tok/s{ratio}" + (f"  {share:.0%} of bandwidth" if name == "decode" else "")
        )
    print(f"  {active_bytes(format, options.layers) / 1e6:.0f} MB a token, {bandwidth / 1e9:.1f} GB/s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", type=lambda text: text.split(","), default=["q4_0", "q4_k"])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--engines", type=lambda text: text.split(","), default=list(ENGINES))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clock", choices=tuple(CLOCKS), default="wall")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "experts-cpu")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in options.formats:
        format = QuantFormat[name.upper()]
        path = options.folder / f"qwen3moe-{options.layers}-{name}.gguf"
        if not path.exists():
            write_file(path, format, options.layers)
        compare(path, format, options)


if __name__ == "__main__":
    main()
