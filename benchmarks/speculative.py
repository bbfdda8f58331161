"""What speculation gives: decode speed with and without, alternating, at batch 1 and 16.

    python benchmarks/speculative.py --model MODEL --prompts spec_bench.jsonl [--method ngram|draft] [--draft MODEL]

Prompts are JSON lines with 'turns' or 'prompt'. Both sides run the same prompts greedily, one after the other, in
alternating order; the ratio is that of the medians over the rounds. Outputs are compared as well: they must be equal.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from bifolio import LLM, SamplingParams, SpeculativeConfig


def read_prompts(path: Path | None, llm: LLM, count: int) -> list[list[int]]:
    """Token ids of prompts spread over the whole file, as chats where the model has a template."""
    if path is None:
        texts = ["Once upon a time", "One day, a little girl", "Tom and Lily were", "There was a big dog"] * count
        texts = texts[:count]
    else:
        entries = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        texts = [
            entry.get("prompt") or entry["turns"][0] for entry in entries[:: max(len(entries) // count, 1)][:count]
        ]
    if llm.model.chat_template:
        ids = [llm.chat_tokens([{"role": "user", "content": text}]) for text in texts]
    else:
        ids = [llm.model.require_tokenizer().encode(text) for text in texts]
    return [tokens[: llm.engine.config.max_model_len // 2] for tokens in ids]


def run(llm: LLM, prompts: list[list[int]], max_tokens: int, batch: int) -> tuple[float, list[list[int]]]:
    """(output tokens per second of decoding, outputs), `batch` prompts at a time."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    outputs, seconds, tokens = [], 0.0, 0
    for first in range(0, len(prompts), batch):
        llm.engine.blocks.drop_cached()
        group = prompts[first : first + batch]
        started = time.perf_counter()
        results = llm.generate(group, params, use_tqdm=False)
        seconds += time.perf_counter() - started
        tokens += sum(len(result.outputs[0].token_ids) for result in results)
        outputs += [result.outputs[0].token_ids for result in results]
    return tokens / seconds, outputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="stories")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--method", choices=("ngram", "draft"), default="ngram")
    parser.add_argument("--draft")
    parser.add_argument("--length", type=int, default=4)
    parser.add_argument("--count", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-model-len", type=int)
    arguments = parser.parse_args()
    options: dict[str, Any] = {"max_num_seqs": 16, "max_model_len": arguments.max_model_len}
    plain = LLM(arguments.model, **options)
    config = SpeculativeConfig(arguments.method, length=arguments.length, draft_model=arguments.draft)
    guessing = LLM(plain.model, speculative=config, **options)
    prompts = read_prompts(arguments.prompts, plain, arguments.count)
    for batch in (1, 16):
        speeds: dict[str, list[float]] = {"plain": [], "guessing": []}
        sides = [("plain", plain), ("guessing", guessing)]
        for number in range(arguments.rounds):
            outputs = {}
            for name, llm in sides if number % 2 == 0 else reversed(sides):
                speed, outputs[name] = run(llm, prompts, arguments.max_tokens, batch)
                speeds[name].append(speed)
            if outputs["plain"] != outputs["guessing"]:
                raise SystemExit("the outputs differ: speculation must not change them")
        assert guessing.engine.speculator is not None
        stats = guessing.engine.speculator.stats
        off, on = (statistics.median(speeds[name]) for name in ("plain", "guessing"))
        print(
            f"batch {batch:2}: {off:7.1f} tok/s plain, {on:7.1f} with {arguments.method}: {on / off:.2f}x; "
            f"{stats.acceptance_rate:.0%} of {stats.num_draft_tokens} guesses right",
            flush=True,
        )


if __name__ == "__main__":
    main()
