"""A hybrid model on this CPU, in bifolio and llama.cpp, in turns: prefill, decode, and the next turn of a conversation.

    python benchmarks/hybrid_cpu.py --formats q4_0,q8_0 --threads 2 --rounds 5
    python benchmarks/hybrid_cpu.py --formats q4_0 --threads 1 --clock processor --rounds 3

The model has random weights and the shape of Qwen3.5-4B, reduced: three gated delta nets for one layer with attention.
Each engine runs in a process of its own; they alternate, round by round. The table shows the best round of each.

A turn has a prompt of `--history` tokens, an answer, and a next prompt of 64 more tokens; the figure is the time to its
first token. The next prompt contains the answer as it was (*next turn*), or without its first half, as chat templates
drop the reasoning of earlier turns (*edited turn*): then neither engine can continue from its last state. llama.cpp
runs by its Python binding, which reads the whole prompt again if it cannot cut its states.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

import k_quants
from k_quants import CLOCKS, ENGINES
from native_models import random_tensor

from bifolio.quant.formats import QuantFormat

VOCAB, HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM = 32768, 1024, 3584, 8, 2, 256
KEY_HEADS, VALUE_HEADS, STATE, TAPS, PERIOD = 8, 16, 128, 4, 4
KEYS, INNER = KEY_HEADS * STATE, VALUE_HEADS * STATE
PROMPT, GENERATED, SEQUENCES = 512, 16, 8
ANSWER, MESSAGE = 32, 64  # tokens of an answer, and of the next message
SPEEDS = ("prefill", "decode", f"decode x{SEQUENCES}")
TURNS = ("next turn", "edited turn")
Measure = Callable[[str, int], float]  # (workload, round) -> tokens per second, or turns per second


# -- the model -------------------------------------------------------------------------------------------------------
def matrices(layers: int) -> dict[str, tuple[int, int]]:
    """Quantised matrices by GGUF name."""
    shapes = {"token_embd": (VOCAB, HIDDEN)}
    for i in range(layers):
        if (i + 1) % PERIOD:
            own = {"attn_qkv": (2 * KEYS + INNER, HIDDEN), "attn_gate": (INNER, HIDDEN), "ssm_out": (HIDDEN, INNER),
                   "ssm_beta": (VALUE_HEADS, HIDDEN), "ssm_alpha": (VALUE_HEADS, HIDDEN)}  # fmt: skip
        else:
            own = {"attn_q": (2 * HEADS * HEAD_DIM, HIDDEN), "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
                   "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN), "attn_output": (HIDDEN, HEADS * HEAD_DIM)}  # fmt: skip
        own |= {"ffn_gate": (FFN, HIDDEN), "ffn_up": (FFN, HIDDEN), "ffn_down": (HIDDEN, FFN)}
        shapes |= {f"blk.{i}.{name}": shape for name, shape in own.items()}
    return shapes


def vectors(layers: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Norms, convolutions and decays, all f32."""
    ones = np.ones(HIDDEN, np.float32)
    found = {"output_norm.weight": ones}
    for i in range(layers):
        own = {"attn_norm.weight": ones, "post_attention_norm.weight": ones}
        if (i + 1) % PERIOD:
            conv = rng.standard_normal((2 * KEYS + INNER, TAPS)).astype(np.float32) * 0.3
            own |= {"ssm_conv1d.weight": conv, "ssm_norm.weight": np.ones(STATE, np.float32),
                    "ssm_dt.bias": rng.standard_normal(VALUE_HEADS).astype(np.float32),
                    "ssm_a": -rng.uniform(0.05, 4, VALUE_HEADS).astype(np.float32)}  # fmt: skip
        else:
            own |= {f"attn_{role}_norm.weight": np.ones(HEAD_DIM, np.float32) for role in "qk"}
        found |= {f"blk.{i}.{name}": value for name, value in own.items()}
    return found


def write_file(path: Path, format: QuantFormat, layers: int) -> None:
    """Write a GGUF file without a vocabulary."""
    import gguf

    writer, rng = gguf.GGUFWriter(str(path), "qwen35", use_temp_file=True), np.random.default_rng(0)
    numbers = {
        "context_length": 32768, "embedding_length": HIDDEN, "block_count": layers, "feed_forward_length": FFN,
        "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM, "rope.dimension_count": HEAD_DIM // 4, "ssm.conv_kernel": TAPS,
        "ssm.inner_size": INNER, "ssm.state_size": STATE, "ssm.time_step_rank": VALUE_HEADS,
        "ssm.group_count": KEY_HEADS, "full_attention_interval": PERIOD, "vocab_size": VOCAB,
    }  # fmt: skip
    for name, number in numbers.items():
        writer.add_uint32(f"qwen35.{name}", number)
    writer.add_array("qwen35.rope.dimension_sections", [11, 11, 10, 0])
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e7)
    writer.add_tokenizer_model("no_vocab")
    kind = gguf.GGMLQuantizationType(format.ggml_type)
    for name, shape in matrices(layers).items():
        writer.add_tensor(f"{name}.weight", random_tensor(*shape, format, rng).data, raw_dtype=kind)
    for name, value in vectors(layers, rng).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# -- the engines -----------------------------------------------------------------------------------------------------
def conversation(name: str, number: int, history: int) -> tuple[list[int], Callable[[list[int]], list[int]]]:
    """A first prompt, and the next one as a function of the answer."""
    rng = np.random.default_rng([number, TURNS.index(name)])
    first, message = (rng.integers(3, VOCAB, count).tolist() for count in (history, MESSAGE))
    return first, lambda answer: first + answer[ANSWER // 2 if name == "edited turn" else 0 :] + message


def bifolio_measure(options: argparse.Namespace) -> Measure:
    from bifolio import LLM, SamplingParams
    from bifolio.measure import throughput
    from bifolio.model.loader import load_model

    now = throughput.time.perf_counter = CLOCKS[options.clock]  # type: ignore[attr-defined]
    tests = dict(
        zip(
            SPEEDS,
            (
                throughput.Test(num_prompt=PROMPT),
                throughput.Test(num_generated=GENERATED),
                throughput.Test(num_generated=4, batch=SEQUENCES),
            ),
            strict=True,
        )
    )
    model = load_model(options.worker_file)
    engine = throughput.bench_llm(model, list(tests.values()), threads=options.threads, device="cpu").engine
    length = options.history + ANSWER + MESSAGE + 16
    llm = LLM(
        model, threads=options.threads, device="cpu", max_num_seqs=1, max_model_len=length, num_blocks=length // 8
    )

    def tokens(prompt: list[int], count: int) -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        return llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids

    def measure(name: str, number: int) -> float:
        if name in tests:
            return throughput.measure(engine, tests[name], number)
        first, next_prompt = conversation(name, number, options.history)
        prompt = next_prompt(tokens(first, ANSWER))
        begin = now()
        tokens(prompt, 1)
        return 1 / (now() - begin)

    return measure


def llama_measure(options: argparse.Namespace) -> Measure:
    import llama_cpp

    now, threads = CLOCKS[options.clock], options.threads
    length = max(options.history + ANSWER + MESSAGE, PROMPT) + 16
    model = llama_cpp.Llama(
        options.worker_file, n_ctx=length, n_batch=PROMPT, n_threads=threads, n_threads_batch=threads, verbose=False
    )
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_seq_max, params.n_batch = 64 * SEQUENCES, SEQUENCES, 64
    params.n_threads = params.n_threads_batch = threads
    context = llama_cpp.llama_init_from_model(model.model, params)
    batch = llama_cpp.llama_batch_init(SEQUENCES, 0, 1)
    batch.n_tokens = SEQUENCES

    def one_step(position: int) -> None:
        for s in range(SEQUENCES):
            batch.token[s], batch.pos[s], batch.n_seq_id[s], batch.logits[s] = 400 + s + position, position, 1, 1
            batch.seq_id[s][0] = s
        if llama_cpp.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")
        llama_cpp.llama_synchronize(context)

    def together() -> float:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        one_step(0)
        begin = now()
        for position in range(1, 5):
            one_step(position)
        return 4 * SEQUENCES / (now() - begin)

    def tokens(prompt: list[int], count: int) -> list[int]:
        generated = model.generate(prompt, temp=0.0, top_k=1)
        return [token for token, _ in zip(generated, range(count), strict=False)]

    def turn(name: str, number: int) -> float:
        first, next_prompt = conversation(name, number, options.history)
        model.reset()
        prompt = next_prompt(tokens(first, ANSWER))
        begin = now()
        tokens(prompt, 1)
        return 1 / (now() - begin)

    def measure(name: str, number: int) -> float:
        if name in TURNS:
            return turn(name, number)
        if name == SPEEDS[2]:
            return together()
        model.reset()
        if name == "decode":
            model.eval([100])
        begin = now()
        if name == "prefill":
            model.eval(np.random.default_rng(number).integers(3, VOCAB, PROMPT).tolist())
            return PROMPT / (now() - begin)
        for i in range(GENERATED):
            model.eval([300 + i])
        return GENERATED / (now() - begin)

    return measure


def work(options: argparse.Namespace) -> None:
    """Main function of an engine process: a workload and a round per input line, its speed per output line."""
    measure = (bifolio_measure if options.worker == ENGINES[0] else llama_measure)(options)
    measure("prefill", 0), measure("decode", 0)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        print(json.dumps(measure(*json.loads(line))), flush=True)


class Worker(k_quants.Worker):
    """A process with an engine that waits for workloads."""

    def __init__(self, engine: str, file: Path, options: argparse.Namespace) -> None:
        command = [sys.executable, __file__, "--worker", engine, "--worker-file", str(file), "--clock", options.clock]
        command += ["--threads", str(options.threads), "--history", str(options.history)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        self._answer()


# -- the comparison --------------------------------------------------------------------------------------------------
def compare(path: Path, options: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Engine -> workload -> the speed of each round."""
    found: dict[str, dict[str, list[float]]] = {engine: {} for engine in options.engines}
    workers = {engine: Worker(engine, path, options) for engine in options.engines}
    try:
        for number in range(options.rounds):
            for name in options.workloads:
                for engine, worker in workers.items():
                    found[engine].setdefault(name, []).append(worker.speed(name, number))
    finally:
        for worker in workers.values():
            worker.close()
    return found


def show(format: str, speeds: dict[str, dict[str, list[float]]], options: argparse.Namespace) -> None:
    for name in options.workloads:
        best = {engine: max(values[name]) for engine, values in speeds.items()}
        is_turn = name in TURNS
        shown = {
            engine: f"{1000 / value:.0f} ms" if is_turn else f"{value:.1f} tok/s" for engine, value in best.items()
        }
        ratio = f"  ratio {best[ENGINES[0]] / best[ENGINES[1]]:.2f}" if len(best) == 2 else ""
        title = f"{name} after {options.history} tokens" if is_turn else name
        print(
            f"{format} {title}: " + "  ".join(f"{engine} {text}" for engine, text in shown.items()) + ratio, flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def names(text: str) -> list[str]:
        return text.split(",")

    parser.add_argument("--formats", type=names, default=["q4_0", "q8_0"])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--history", type=int, default=4000)
    parser.add_argument("--engines", type=names, default=list(ENGINES))
    parser.add_argument("--workloads", type=names, default=[*SPEEDS, *TURNS])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clock", choices=tuple(CLOCKS), default="wall")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "hybrid-cpu")
    parser.add_argument("--json", type=Path, help="file for the speed of every round")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--worker-file", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return work(options)
    options.folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    for name in options.formats:
        path = options.folder / f"qwen35-{options.layers}-{name}.gguf"
        if not path.exists():
            write_file(path, QuantFormat[name.upper()], options.layers)
        results[name] = compare(path, options)
        show(name, results[name], options)
        if options.json:
            options.json.write_text(json.dumps(results, indent=1))
    return None


if __name__ == "__main__":
    main()
