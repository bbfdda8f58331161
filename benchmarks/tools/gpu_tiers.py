"""Prompts restored from host memory and from files into a GPU's cache, through `LLM` on a model folder.

    python -m benchmarks.tools.gpu_tiers llama-8b --models /dev/shm/models --folder /data/kv      # rows of JSON
    python -m benchmarks.tools.gpu_tiers llama-8b --tiny --device torch --tokens 600              # without a GPU

Two prompts take turns in a cache that holds one of them, so that each comes back from the tier. `ttft_ms` has the read,
the copy to the device, and the last block, which is computed. The second part repeats this while other requests decode,
and gives their time per step with and without a restore beside them. The third is an engine that is started on the
files of another.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.models import ModelStore
from bifolio import LLM, SamplingParams

ONE = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
OTHERS = 8  # requests that decode meanwhile
GOAL_BYTES_PER_SECOND = 45e9
GOAL_SECONDS = 0.005


def prompt_of(number: int, length: int, vocabulary: int) -> list[int]:
    return [4 + (31 * number + 7 * place + place * place % 13) % (vocabulary - 8) for place in range(length)]


def first_token(llm: LLM, name: str, prompt: list[int]) -> tuple[float, int, list[float]]:
    """Seconds to the first token, cached tokens, and the seconds of each step until then."""
    engine, steps = llm.engine, []
    request = engine.add_request(name, prompt, ONE)
    while not request.is_finished:
        started = time.perf_counter()
        engine.step()
        steps.append(time.perf_counter() - started)
    if request.error is not None:
        raise RuntimeError(request.error)
    return request.metrics.time_to_first_token, request.metrics.num_cached_tokens, steps


def alternate(llm: LLM, prompts: list[list[int]], turns: int) -> dict[str, Any]:
    """Times to the first token, computed and restored."""
    tiers, size = llm.engine.tiers, llm.engine.runner.storage.layout.bytes_per_block
    assert tiers is not None
    computed = []
    for number, prompt in enumerate(prompts):
        computed.append(first_token(llm, f"computed-{number}", prompt)[0])
        tiers.copies.flush(120)
    restored, cached = [], 0
    for turn in range(turns):
        for number, prompt in enumerate(prompts):
            seconds, cached, _ = first_token(llm, f"restored-{turn}-{number}", prompt)
            restored.append(seconds)
    num_bytes = cached // llm.engine.blocks.block_size * size
    best = min(restored)
    return {
        "tokens": len(prompts[0]), "cached": cached, "bytes": num_bytes, "computed_ms": _ms(computed),
        "ttft_ms": _ms(restored), "best_ttft_ms": round(1e3 * best, 2), "gb_per_s": round(num_bytes / best / 1e9, 2),
        "goal_ms": round(1e3 * (num_bytes / GOAL_BYTES_PER_SECOND + GOAL_SECONDS), 2),
        "tier_hits": llm.engine.stats().tiers.num_tier_hits, "dropped": llm.engine.stats().tiers.num_tier_dropped,
    }  # fmt: skip


def beside_others(llm: LLM, prompts: list[list[int]], turns: int) -> dict[str, Any]:
    """Seconds per step of requests that decode, alone and while a prompt is restored."""
    engine, vocabulary = llm.engine, llm.model.config.vocab_size
    params = SamplingParams(temperature=0.0, max_tokens=4000, ignore_eos=True, detokenize=False)
    for number in range(OTHERS):
        engine.add_request(f"other-{number}", prompt_of(50 + number, 40, vocabulary), params)
    for _ in range(40):
        engine.step()
    alone, beside, restored = [], [], []
    for turn in range(turns):
        for number, prompt in enumerate(prompts):
            started = time.perf_counter()
            for _ in range(20):
                engine.step()
            alone.append((time.perf_counter() - started) / 20)
            seconds, _, steps = first_token(llm, f"beside-{turn}-{number}", prompt)
            restored.append(seconds)
            beside += steps[1:-3]  # without the steps that plan it and compute its last block
    engine.abort_all()
    while engine.has_work:
        engine.step()
    return {
        "step_alone_ms": _ms(alone), "step_beside_ms": _ms(beside), "steps_beside": len(beside),
        "mean_step_beside_ms": round(1e3 * statistics.mean(beside), 3) if beside else 0.0, "ttft_ms": _ms(restored),
    }  # fmt: skip


def _ms(seconds: list[float]) -> float:
    return round(1e3 * statistics.median(seconds), 3) if seconds else 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a model of the rows, such as llama-8b")
    parser.add_argument("--models", type=Path, default=Path("out/models"), help="folder for model files")
    parser.add_argument("--folder", type=Path, help="folder of the tier of files; default: a temporary one")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--device", default="cuda", help="cuda, or torch: torch's kernels on the CPU")
    parser.add_argument("--tiny", action="store_true", help="a tiny model of the same architecture")
    parser.add_argument("--parts", default="memory,files,restart")
    options = parser.parse_args()
    path = ModelStore(options.models, options.tiny).path(options.model)
    device: dict[str, Any] = {"kernels": "torch"} if options.device == "torch" else {"device": options.device}
    size = 16 if options.tiny else 64
    each = -(-options.tokens // size)
    engine: dict[str, Any] = {
        **device, "block_size": size, "max_model_len": options.tokens + 4 * size, "max_num_seqs": 2 * OTHERS,
        "num_blocks": each + each // 4 + OTHERS * 10,  # one prompt, and the others
    }  # fmt: skip
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="bifolio-tiers-", dir=options.folder))
    kinds: dict[str, dict[str, Any]] = {
        "memory": {"kv_offload": "12GB" if not options.tiny else "64MB"},
        "files": {"kv_offload_dir": folder},
    }
    kinds["restart"] = kinds["files"]
    try:
        for kind in options.parts.split(","):
            started = time.perf_counter()
            with LLM(path, **engine, **kinds[kind]) as llm:
                ready = time.perf_counter() - started
                vocabulary = llm.model.config.vocab_size
                prompts = [prompt_of(number, options.tokens, vocabulary) for number in range(2)]
                row: dict[str, Any] = {"part": kind, "ready_s": round(ready, 2)}
                if kind == "restart":
                    seconds, cached, _ = first_token(llm, "restart", prompts[0])
                    print(json.dumps({**row, "ttft_ms": round(1e3 * seconds, 2), "cached": cached}), flush=True)
                    continue
                print(json.dumps({**row, **alternate(llm, prompts, options.turns)}), flush=True)
                print(json.dumps({**row, **beside_others(llm, prompts, options.turns)}), flush=True)
    finally:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
