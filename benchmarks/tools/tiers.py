"""Conversations whose blocks exceed the cache, with and without the tiers below it.

    python -m benchmarks.tools.tiers -m smollm2                 # rows of JSON, the runs in turns

Conversations take turns: each prompt has all tokens of the conversation before it. The cache holds a tenth of all
blocks, so without a tier every turn computes its history again; with an unlimited cache none does.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import tempfile
import time
from typing import Any

from bifolio import LLM, SamplingParams


def measure(
    model: str, conversations: int, turns: int, beginning: int, user: int, answer: int, **options: Any
) -> dict[str, Any]:
    """One run: times to the first token of the turns after the first, and cached tokens."""
    length = beginning + turns * (user + answer)
    with LLM(model, max_model_len=length + 16, max_num_seqs=1, **options) as llm:
        vocabulary = llm.model.config.vocab_size
        generator = random.Random(0)
        texts: list[list[int]] = [[] for _ in range(conversations)]
        first, cached, prompts = [], 0, 0
        started = time.perf_counter()
        for turn in range(turns):
            for text in texts:
                text += [generator.randrange(100, vocabulary - 100) for _ in range(user if turn else beginning)]
                params = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True, detokenize=False)
                request = llm.engine.add_request(f"{turn}-{id(text)}", text, params)
                while llm.engine.has_work:
                    llm.engine.step()
                text += request.sequences[0].output_token_ids
                if turn:
                    first.append(request.metrics.time_to_first_token)
                    cached += request.metrics.num_cached_tokens
                    prompts += len(request.prompt_token_ids)
        seconds = time.perf_counter() - started
        stats = llm.engine.stats().tiers
    return {
        "ttft_p50_ms": 1e3 * statistics.median(first),
        "ttft_p90_ms": 1e3 * statistics.quantiles(first, n=10)[-1],
        "hit_rate": cached / prompts,
        "seconds": seconds,
        "tier_bytes": stats.num_tier_bytes,
        "dropped": stats.num_tier_dropped,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", default="smollm2")
    parser.add_argument("--conversations", type=int, default=20)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--beginning", type=int, default=600, help="tokens of the first message")
    parser.add_argument("--user", type=int, default=32, help="tokens of each later one")
    parser.add_argument("--answer", type=int, default=16, help="tokens of an answer")
    parser.add_argument("--repetitions", type=int, default=2)
    arguments = parser.parse_args()
    sizes = (arguments.conversations, arguments.turns, arguments.beginning, arguments.user, arguments.answer)
    each = -(-(arguments.beginning + arguments.turns * (arguments.user + arguments.answer)) // 16) + 4
    blocks = arguments.conversations * each
    small = max(blocks // 10, each)
    for repetition in range(arguments.repetitions):
        folder = tempfile.mkdtemp(prefix="bifolio-tiers-")
        kinds: dict[str, dict[str, Any]] = {
            "without": {"num_blocks": small},
            "files": {"num_blocks": small, "kv_offload_dir": folder},
            "restarted": {"num_blocks": small, "kv_offload_dir": folder},  # the files of the run before
            "unlimited": {"num_blocks": blocks + 64},
        }
        try:
            for kind, options in kinds.items():
                row = {"kind": kind, "repetition": repetition, "num_blocks": options["num_blocks"]}
                print(json.dumps({**row, **measure(arguments.model, *sizes, **options)}), flush=True)
        finally:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
