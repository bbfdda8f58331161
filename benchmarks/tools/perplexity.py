"""The perplexity of a model file in bifolio and in llama.cpp, on the same tokens.

    python -m benchmarks.tools.perplexity score a.Q4_K_M.gguf --text prose.txt --scores ours.npy
    python -m benchmarks.tools.perplexity score a.Q4_K_M.gguf --text prose.txt --scores theirs.npy --engine llama.cpp
    python -m benchmarks.tools.perplexity compare theirs.npy ours.npy

Both engines score the same tokens, divided by bifolio's tokenizer, in whole windows that do not overlap. `compare`
gives the difference of two perplexities with its standard error: the tokens are the same, so most noise cancels.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Scores = list[NDArray[np.float64]]  # the logprobs of the tokens of each window but its first


def windows_of(options: argparse.Namespace) -> list[list[int]]:
    from bifolio.model.loader import load_model

    tokenizer = load_model(options.files[0]).require_tokenizer()
    first = tokenizer.encode("")
    first = first if len(first) == 1 else []
    text = options.text.read_text(encoding="utf-8", errors="replace")
    ids, step = tokenizer.encode(text, add_special_tokens=False), options.window - len(first)
    parts = [[*first, *ids[i * step : (i + 1) * step]] for i in range(options.windows)]
    if len(parts[-1]) < options.window:
        raise SystemExit(f"the text has {len(ids)} tokens: too few for {options.windows} windows")
    return parts


def bifolio_scores(options: argparse.Namespace, parts: list[list[int]]) -> Scores:
    from bifolio import LLM, SamplingParams

    llm = LLM(options.files[0], threads=options.threads, max_num_seqs=1, max_model_len=options.window + 1,
              enable_prefix_caching=False, kv_cache_dtype=options.cache, activations=options.activations,
              kernels=options.kernels)  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=0, detokenize=False)
    outputs = [llm.generate([part], params, use_tqdm=False)[0].prompt_logprobs or [] for part in parts]
    return [np.array([entry.logprob for entry in each if entry is not None]) for each in outputs]


def llama_scores(options: argparse.Namespace, parts: list[list[int]]) -> Scores:
    import llama_cpp

    kind = {"f32": llama_cpp.GGML_TYPE_F32, "f16": llama_cpp.GGML_TYPE_F16}[options.cache]
    llama = llama_cpp.Llama(options.files[0], n_ctx=options.window, n_batch=options.window, n_threads=options.threads,
                            n_threads_batch=options.threads, logits_all=True, verbose=False,
                            type_k=kind, type_v=kind)  # fmt: skip
    found: Scores = []
    for part in parts:
        llama.reset()
        llama.eval(part)
        logits = np.asarray(llama.scores[: len(part) - 1], np.float32)
        logits -= logits.max(axis=1, keepdims=True)
        chosen = logits[np.arange(len(part) - 1), part[1:]].astype(np.float64)
        found.append(chosen - np.log(np.exp(logits, out=logits).sum(axis=1, dtype=np.float64)))
    return found


def score(options: argparse.Namespace) -> None:
    parts = windows_of(options)
    scores = np.concatenate((bifolio_scores if options.engine == "bifolio" else llama_scores)(options, parts))
    if options.scores:
        np.save(options.scores, scores)
    print(f"{options.files[0]}: {math.exp(-scores.mean()):.4f} on {len(scores)} tokens")


def compare(options: argparse.Namespace) -> None:
    """Perplexities of files of `--scores`, and their differences to the first with the standard error."""
    first, *others = [np.load(path) for path in options.files]
    print(f"{options.files[0]}: {math.exp(-first.mean()):.4f} on {len(first)} tokens")
    for path, scores in zip(options.files[1:], others, strict=True):
        excess = first - scores  # in nats for each token
        error = excess.std() / math.sqrt(len(excess))
        print(f"{path}: {math.exp(-scores.mean()):.4f}, {math.expm1(excess.mean()):+.3%} +- {error:.3%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", choices=("score", "compare"))
    parser.add_argument("files", nargs="+", help="a model file, or files of --scores")
    parser.add_argument("--engine", choices=("bifolio", "llama.cpp"), default="bifolio")
    parser.add_argument("--text", type=Path, help="text to score")
    parser.add_argument("--scores", type=Path, help="file for the logprobs of all tokens")
    parser.add_argument("--window", type=int, default=256, help="tokens of a window")
    parser.add_argument("--windows", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cache", default="f16", help="type of keys and values: f16 or f32")
    parser.add_argument("--activations", default="int8", help="of bifolio: int8 or int16")
    parser.add_argument("--kernels", default=None, help="of bifolio: a kernel set")
    options = parser.parse_args()
    if options.work == "score" and options.text is None:
        parser.error("score needs --text")
    (score if options.work == "score" else compare)(options)


if __name__ == "__main__":
    main()
