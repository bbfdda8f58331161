"""Real GGUF files in bifolio and llama.cpp, in turns: speed, start, memory; and the perplexity of both.

    python benchmarks/k_quants.py turns a.Q4_K_M.gguf b.Q6_K.gguf --threads 2 --rounds 5 --json found.json
    python benchmarks/k_quants.py turns a.Q4_K_M.gguf --threads 1 --clock processor
    python benchmarks/k_quants.py perplexity a.Q4_K_M.gguf --text prose.txt --scores a.npy
    python benchmarks/k_quants.py perplexity a.Q4_K_M.gguf --text prose.txt --scores b.npy --engine llama.cpp
    python benchmarks/k_quants.py compare a.npy b.npy

`turns` gives one table for all files: prefill, one sequence, 16 sequences (tokens per second), the seconds from the
start of a process to its first token, and its peak memory. Each engine loads a file in a process of its own. They
alternate, round by round, and the table shows the median of the rounds, or with `--best` the best one. On a machine
that other programs use, the clock `processor` counts processor time, and one thread is enough. `compare` gives the
difference of two perplexities with its standard error: both score the same tokens, so most of the noise cancels.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ENGINES = ("bifolio", "llama.cpp")
PROMPT, GENERATED, SEQUENCES = 128, 16, 16
SPEEDS = ("prefill", "decode", "decode x16")
FIRST_PROMPT = "The capital of France is"
SPAWNED = "K_QUANTS_SPAWNED"  # the time at which a process was started, for that process
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}
Speed = Callable[[str, int], float]  # (workload, round) -> tokens per second


# -- speed -----------------------------------------------------------------------------------------------------------
def bifolio_speed(path: str, threads: int, clock: str) -> Speed:
    from bifolio.measure import throughput
    from bifolio.model.loader import load_model

    time.perf_counter = CLOCKS[clock]  # the clock of `throughput`
    tests = {
        "prefill": throughput.Test(num_prompt=PROMPT),
        "decode": throughput.Test(num_generated=GENERATED),
        "decode x16": throughput.Test(num_generated=4, batch=SEQUENCES),
    }
    engine = throughput.bench_llm(load_model(path), list(tests.values()), threads=threads, device="cpu").engine
    return lambda name, number: throughput.measure(engine, tests[name], number)


def llama_speed(path: str, threads: int, clock: str) -> Speed:
    import llama_cpp

    now = CLOCKS[clock]
    model = llama_cpp.Llama(path, n_ctx=512, n_batch=512, n_threads=threads, n_threads_batch=threads, verbose=False)
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

    def speed(name: str, number: int) -> float:
        if name == "decode x16":
            llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
            one_step(0)
            begin = now()
            for position in range(1, 5):
                one_step(position)
            return 4 * SEQUENCES / (now() - begin)
        model.reset()
        if name == "decode":
            model.eval([100])
        begin = now()
        if name == "prefill":
            model.eval(list(range(100 + number, 100 + number + PROMPT)))
            return PROMPT / (now() - begin)
        for i in range(GENERATED):
            model.eval([300 + i])
        return GENERATED / (now() - begin)

    return speed


def work(options: argparse.Namespace) -> None:
    """Main function of an engine process: a workload and a round per input line, tokens per second per output line."""
    make = bifolio_speed if options.engine == "bifolio" else llama_speed
    speed = make(options.files[0], options.threads, options.clock)
    speed("prefill", 0), speed("decode", 0)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        name, number = json.loads(line)
        print(json.dumps(speed(name, number)), flush=True)


# -- start -----------------------------------------------------------------------------------------------------------
def bifolio_start(path: str, threads: int) -> Callable[[int], str]:
    from bifolio import LLM, SamplingParams

    llm = LLM(path, threads=threads, max_num_seqs=1, max_model_len=512)

    def generate(tokens: int) -> str:
        params = SamplingParams(max_tokens=tokens, temperature=0)
        return llm.generate([FIRST_PROMPT], params, use_tqdm=False)[0].outputs[0].text

    generate.cache_mb = llm.plan.cache_bytes / 1e6  # type: ignore[attr-defined]
    return generate


def llama_start(path: str, threads: int) -> Callable[[int], str]:
    import llama_cpp

    llm = llama_cpp.Llama(path, n_ctx=512, n_batch=512, n_threads=threads, n_threads_batch=threads, verbose=False)
    return lambda tokens: str(llm(FIRST_PROMPT, max_tokens=tokens, temperature=0)["choices"][0]["text"])


def start(options: argparse.Namespace) -> None:
    """Open a file, write one token, then eight; print the time of imports, of the first token, and the peak memory."""
    spawned = float(os.environ.get(SPAWNED) or time.time())  # with the start of Python, if `turns` made this process
    began = time.perf_counter()
    __import__("bifolio.api.llm" if options.engine == "bifolio" else "llama_cpp")
    imported = time.perf_counter() - began
    generate = (bifolio_start if options.engine == "bifolio" else llama_start)(options.files[0], options.threads)
    generate(1)
    first = time.time() - spawned
    processor = time.process_time()
    text = generate(8)
    record = {"import s": imported, "first token s": first, "processor s": processor, "text": text}
    record["peak MB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    record["cache MB"] = getattr(generate, "cache_mb", 0.0)
    print(json.dumps(record))


# -- turns -----------------------------------------------------------------------------------------------------------
class Worker:
    """A process with an engine that waits for workloads."""

    def __init__(self, engine: str, file: str, options: argparse.Namespace) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command("work", engine, file, options), stdin=pipe, stdout=pipe, text=True)
        self._answer()

    def speed(self, name: str, number: int) -> float:
        assert self._process.stdin
        self._process.stdin.write(json.dumps([name, number]) + "\n")
        self._process.stdin.flush()
        return float(self._answer())

    def _answer(self) -> Any:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("an engine process ended: see its error above")
        return json.loads(line)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def command(figure: str, engine: str, file: str, options: argparse.Namespace) -> list[str]:
    arguments = [sys.executable, __file__, figure, file, "--engine", engine, "--threads", str(options.threads)]
    return [*arguments, "--clock", options.clock]


def started(engine: str, file: str, options: argparse.Namespace) -> dict[str, Any]:
    arguments, environment = command("start", engine, file, options), {**os.environ, SPAWNED: str(time.time())}
    found = subprocess.run(arguments, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    record: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    return record


def turns(file: str, options: argparse.Namespace) -> dict[str, Any]:
    """All figures of a file: engine -> figure -> median (or best) of the rounds."""
    starts: dict[str, list[dict[str, Any]]] = {engine: [] for engine in options.engines}
    for _ in range(min(options.rounds, 3)):
        for engine in options.engines:
            starts[engine].append(started(engine, file, options))
    workers = {engine: Worker(engine, file, options) for engine in options.engines}
    speeds: dict[str, dict[str, list[float]]] = {engine: {name: [] for name in SPEEDS} for engine in options.engines}
    try:
        for number in range(options.rounds):
            for name in SPEEDS:
                for engine, worker in workers.items():
                    speeds[engine][name].append(worker.speed(name, number))
    finally:
        for worker in workers.values():
            worker.close()
    result: dict[str, Any] = {"file": Path(file).name, "file MB": Path(file).stat().st_size / 1e6, "engines": {}}
    for engine in options.engines:
        high = max if options.best else statistics.median
        low = min if options.best else statistics.median
        record = {name: high(values) for name, values in speeds[engine].items()}
        for key in ("first token s", "import s", "processor s", "peak MB", "cache MB"):
            record[key] = low([each[key] for each in starts[engine]])
        result["engines"][engine] = record | {"text": starts[engine][0]["text"]}
    return result


def table(results: list[dict[str, Any]]) -> str:
    """A table in Markdown; ratios are above 1 where bifolio is better."""
    lines = ["| file | figure | bifolio | llama.cpp | ratio |", "|---|---|---|---|---|"]
    for result in results:
        ours, theirs = (result["engines"].get(engine, {}) for engine in ENGINES)
        for key in (*SPEEDS, "first token s", "processor s", "peak MB"):
            if key not in ours or key not in theirs:
                continue
            ratio = ours[key] / theirs[key] if key in SPEEDS else theirs[key] / ours[key]
            lines.append(f"| {result['file']} | {key} | {ours[key]:.2f} | {theirs[key]:.2f} | {ratio:.2f} |")
        if ours:
            allowed = 1.15 * result["file MB"] / 1.048576 + ours["cache MB"] / 1.048576 + 60
            lines.append(f"| {result['file']} | 1.15 file + cache + 60 MB | {allowed:.0f} | | |")
    return "\n".join(lines)


# -- perplexity ------------------------------------------------------------------------------------------------------
def perplexity(options: argparse.Namespace) -> dict[str, float]:
    """Both engines score the same tokens, cut by bifolio's tokenizer, over whole windows that do not overlap."""
    from bifolio.model.loader import load_model

    path, length = options.files[0], options.window
    model = load_model(path)
    tokenizer = model.require_tokenizer()
    first = tokenizer.encode("")
    first = first if len(first) == 1 else []
    text = options.text.read_text(encoding="utf-8", errors="replace")
    ids, step = tokenizer.encode(text, add_special_tokens=False), length - len(first)
    parts = [[*first, *ids[i * step : (i + 1) * step]] for i in range(options.windows)]
    if len(parts[-1]) < length:
        raise SystemExit(f"the text has {len(ids)} tokens: too few for {options.windows} windows")
    scores = np.concatenate((bifolio_scores if options.engine == "bifolio" else llama_scores)(path, parts, options))
    if options.scores:
        np.save(options.scores, scores)
    return {"tokens": len(scores), "perplexity": math.exp(-scores.mean())}


def bifolio_scores(path: str, parts: list[list[int]], options: argparse.Namespace) -> list[np.ndarray]:
    """The logprobs of the tokens of each window but its first."""
    from bifolio import LLM, SamplingParams

    llm = LLM(path, threads=options.threads, max_num_seqs=1, max_model_len=options.window + 1,
              enable_prefix_caching=False, kv_cache_dtype=options.cache, activations=options.activations,
              kernels=options.kernels)  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=0, detokenize=False)
    outputs = [llm.generate([part], params, use_tqdm=False)[0].prompt_logprobs or [] for part in parts]
    return [np.array([entry.logprob for entry in each if entry is not None]) for each in outputs]


def llama_scores(path: str, parts: list[list[int]], options: argparse.Namespace) -> list[np.ndarray]:
    """The same of llama.cpp."""
    import llama_cpp

    kind = {"f32": llama_cpp.GGML_TYPE_F32, "f16": llama_cpp.GGML_TYPE_F16}[options.cache]
    llama = llama_cpp.Llama(path, n_ctx=options.window, n_batch=options.window, n_threads=options.threads,
                            n_threads_batch=options.threads, logits_all=True, verbose=False,
                            type_k=kind, type_v=kind)  # fmt: skip
    found = []
    for part in parts:
        llama.reset()
        llama.eval(part)
        logits = np.asarray(llama.scores[: len(part) - 1], np.float32)
        logits -= logits.max(axis=1, keepdims=True)
        chosen = logits[np.arange(len(part) - 1), part[1:]].astype(np.float64)
        found.append(chosen - np.log(np.exp(logits, out=logits).sum(axis=1, dtype=np.float64)))
    return found


def compare(options: argparse.Namespace) -> str:
    """Perplexities of files of `--scores`, and their differences to the first with the standard error, in percent."""
    first, *others = [np.load(path) for path in options.files]
    lines = [f"{options.files[0]}: {math.exp(-first.mean()):.4f} on {len(first)} tokens"]
    for path, scores in zip(options.files[1:], others, strict=True):
        excess = first - scores  # in nats for each token
        error = excess.std() / math.sqrt(len(excess))
        lines.append(f"{path}: {math.exp(-scores.mean()):.4f}, {math.expm1(excess.mean()):+.3%} +- {error:.3%}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figure", choices=("turns", "start", "perplexity", "compare", "work"))
    parser.add_argument("files", nargs="+")
    parser.add_argument("--engine", choices=ENGINES, default="bifolio", help="for start and perplexity")
    parser.add_argument("--engines", type=lambda text: text.split(","), default=list(ENGINES), help="for turns")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clock", choices=tuple(CLOCKS), default="wall")
    parser.add_argument("--best", action="store_true", help="the best round instead of the median")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--text", type=Path, help="of perplexity")
    parser.add_argument("--scores", type=Path, help="file for the logprobs of all tokens: npy")
    parser.add_argument("--windows", type=int, default=3)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--cache", choices=("f16", "f32"), default="f16")
    parser.add_argument("--activations", default="int8")
    parser.add_argument("--kernels", help="native or reference")
    options = parser.parse_args()
    if options.figure in ("start", "work"):
        return start(options) if options.figure == "start" else work(options)
    if options.figure == "perplexity":
        print(json.dumps({"engine": options.engine, "file": Path(options.files[0]).name, **perplexity(options)}))
        return None
    if options.figure == "compare":
        return print(compare(options))
    results = []
    for file in options.files:
        results.append(turns(file, options))
        if options.json:
            options.json.write_text(json.dumps(results, indent=1))
    print(table(results))
    return None


if __name__ == "__main__":
    main()
