"""Real GGUF files in bifolio and llama.cpp: speed by processor time, the first tokens of a process, perplexity.

    python benchmarks/k_quants.py speed model.Q4_K_M.gguf --engine bifolio
    python benchmarks/k_quants.py speed model.Q4_K_M.gguf --engine llama.cpp
    python benchmarks/k_quants.py start model.Q4_K_M.gguf
    python benchmarks/k_quants.py perplexity model.Q4_K_M.gguf --engine llama.cpp --text prose.txt

One engine a process, one thread: processor time hardly depends on other programs.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np

PROMPT, GENERATED, SEQUENCES = 128, 8, 16


def bifolio_speed(path: str) -> dict[str, float]:
    """Tokens per second of processor time: the best of several runs."""
    from bifolio.measure import throughput
    from bifolio.model.loader import load_model

    time.perf_counter = time.process_time  # the clock of `throughput`
    tests = [
        throughput.Test(num_prompt=PROMPT),
        throughput.Test(num_generated=GENERATED),
        throughput.Test(num_generated=GENERATED // 2, batch=SEQUENCES),
    ]
    engine = throughput.bench_llm(load_model(path), tests, threads=1, device="cpu").engine
    for test in (throughput.Test(num_prompt=16), throughput.Test(num_generated=4)):
        throughput.measure(engine, test)
    best = [
        max(throughput.measure(engine, test, seed) for seed in range(runs))
        for test, runs in zip(tests, (3, 6, 2), strict=True)
    ]
    return dict(zip(("prefill", "decode", "decode x16"), best, strict=True))


def llama_speed(path: str) -> dict[str, float]:
    """The same in llama.cpp."""
    import llama_cpp

    model = llama_cpp.Llama(path, n_ctx=512, n_batch=512, n_threads=1, n_threads_batch=1, verbose=False)

    def speed(tokens: int, work: Any) -> float:
        begin = time.process_time()
        work()
        return tokens / (time.process_time() - begin)

    prefill = []
    for first in range(3):
        model.reset()
        prefill.append(speed(PROMPT, lambda first=first: model.eval(list(range(100 + first, 100 + first + PROMPT)))))
    decode = [speed(GENERATED, lambda: [model.eval([300 + i]) for i in range(GENERATED)]) for _ in range(6)]
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_seq_max, params.n_batch, params.n_threads, params.n_threads_batch = 1024, SEQUENCES, 64, 1, 1
    context = llama_cpp.llama_init_from_model(model.model, params)
    batch = llama_cpp.llama_batch_init(SEQUENCES, 0, 1)
    batch.n_tokens = SEQUENCES
    together = []
    for step in range(5):
        for s in range(SEQUENCES):
            batch.token[s], batch.pos[s], batch.n_seq_id[s], batch.logits[s] = 400 + s + step, step, 1, 1
            batch.seq_id[s][0] = s
        together.append(speed(SEQUENCES, lambda: llama_cpp.llama_decode(context, batch)))
    return {"prefill": max(prefill), "decode": max(decode), "decode x16": max(together)}


def start(path: str) -> dict[str, Any]:
    """Seconds, processor seconds and peak memory of a process that opens a file and writes eight tokens."""
    began = time.perf_counter()
    from bifolio import LLM, SamplingParams

    llm = LLM(path, threads=2, max_num_seqs=1, max_model_len=512)
    found = llm.generate(["The capital of France is"], SamplingParams(max_tokens=8, temperature=0), use_tqdm=False)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    record = {"seconds": time.perf_counter() - began, "processor_seconds": time.process_time(), "peak_mb": peak}
    return {**record, "file_mb": Path(path).stat().st_size / 1e6, "text": found[0].outputs[0].text}


def perplexity(path: str, engine: str, text: str, windows: int, length: int, activations: str) -> dict[str, float]:
    """Both engines score the same tokens, cut by bifolio's tokenizer."""
    from bifolio.model.loader import load_model

    model = load_model(path)
    tokenizer = model.require_tokenizer()
    first = tokenizer.encode("")
    first = first if len(first) == 1 else []
    ids, step = tokenizer.encode(text, add_special_tokens=False), length - len(first)
    parts = [[*first, *ids[i * step : (i + 1) * step]] for i in range(windows)]
    if engine == "bifolio":
        from bifolio import LLM
        from bifolio.measure.perplexity import mean_over

        llm = LLM(model, threads=2, max_num_seqs=1, max_model_len=length + 1, enable_prefix_caching=False,
                  dtype="f16", activations=activations)  # fmt: skip
        return {"perplexity": mean_over(llm, parts).value}
    import llama_cpp

    llama = llama_cpp.Llama(path, n_ctx=length, n_batch=length, n_threads=2, logits_all=True, verbose=False)
    total, count = 0.0, 0
    for part in parts:
        llama.reset()
        llama.eval(part)
        scores = np.asarray(llama.scores[: len(part)], np.float64)
        scores -= scores.max(axis=1, keepdims=True)
        scores -= np.log(np.exp(scores).sum(axis=1, keepdims=True))
        total -= float(scores[np.arange(len(part) - 1), part[1:]].sum())
        count += len(part) - 1
    return {"perplexity": math.exp(total / count)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figure", choices=("speed", "start", "perplexity"))
    parser.add_argument("file")
    parser.add_argument("--engine", choices=("bifolio", "llama.cpp"), default="bifolio")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--windows", type=int, default=3)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--activations", default="int8")
    options = parser.parse_args()
    if options.figure == "speed":
        record: dict[str, Any] = (bifolio_speed if options.engine == "bifolio" else llama_speed)(options.file)
    elif options.figure == "start":
        record = start(options.file)
    else:
        text = options.text.read_text(encoding="utf-8", errors="replace")
        record = perplexity(options.file, options.engine, text, options.windows, options.window, options.activations)
    print(json.dumps({"engine": options.engine, "file": Path(options.file).name, **record}))


if __name__ == "__main__":
    main()
