r"""Speed-up of speculative decoding at batch sizes 1 and 16.

    python -m benchmarks.tools.speculative --model MODEL --prompts spec_bench.jsonl [--method ngram|draft|eagle|mtp] \
        [--draft MODEL or folder of a head] [--fixed]

Prompts are JSON lines with 'turns' or 'prompt'. Runs with and without speculation alternate for every group of prompts,
greedily; the ratio is that of the summed medians over the rounds. Times include prefill. The benchmark fails if the
outputs differ. `--paired` runs each group of prompts on both engines, whose steps alternate, and compares the processor
time of this thread: on a shared machine it is more precise than whole runs. `--fixed` always drafts `--length` tokens:
its acceptance rate is that of the drafts, where the adaptive run may make few of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

from bifolio import LLM, SamplingParams, SpeculativeConfig
from bifolio.config import SPECULATIVE_METHODS


class Run(NamedTuple):
    seconds: float
    cpu_seconds: float
    outputs: list[list[int]]


def read_prompts(path: Path | None, llm: LLM, count: int) -> list[list[int]]:
    """Token ids of prompts evenly spaced over the file, as chats if the model has a template."""
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


def run(llm: LLM, group: list[list[int]], max_tokens: int) -> Run:
    """Complete a group of prompts in one batch."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    llm.engine.blocks.drop_cached()
    started, started_cpu = time.perf_counter(), time.process_time()
    results = llm.generate(group, params, use_tqdm=False)
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - started_cpu
    return Run(seconds, cpu_seconds, [result.outputs[0].token_ids for result in results])


def compare(plain: LLM, guessing: LLM, group: list[list[int]], max_tokens: int, rounds: int) -> tuple[Run, Run]:
    """The median times with and without speculation, in alternating rounds."""
    runs: list[list[Run]] = [[], []]
    for number in range(rounds):
        for side in (0, 1) if number % 2 == 0 else (1, 0):
            runs[side].append(run((plain, guessing)[side], group, max_tokens))
        if runs[0][-1].outputs != runs[1][-1].outputs:
            raise SystemExit("the outputs differ: speculation must not change them")
    first, second = (
        Run(statistics.median(r.seconds for r in side), statistics.median(r.cpu_seconds for r in side), side[0].outputs)
        for side in runs
    )
    return first, second


def compare_steps(plain: LLM, guessing: LLM, group: list[list[int]], max_tokens: int) -> tuple[float, float]:
    """Processor seconds of both engines, whose steps alternate."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    engines = (plain.engine, guessing.engine)
    seconds, requests = [0.0, 0.0], []
    for engine in engines:
        engine.blocks.drop_cached()
        requests.append([engine.add_request(str(number), prompt, params) for number, prompt in enumerate(group)])
    while any(engine.has_work for engine in engines):
        for side, engine in enumerate(engines):
            if engine.has_work:
                started = time.thread_time()
                engine.step()
                seconds[side] += time.thread_time() - started
    first, second = ([request.sequences[0].output_token_ids for request in side] for side in requests)
    if first != second:
        raise SystemExit("the outputs differ: speculation must not change them")
    return seconds[0], seconds[1]


def paired(plain: LLM, guessing: LLM, groups: list[list[list[int]]], max_tokens: int, rounds: int) -> None:
    """Print the ratio of each round; the first contains all that is done once."""
    for number in range(rounds):
        pairs = [compare_steps(plain, guessing, group, max_tokens) for group in groups]
        ratios = sorted(off / on for off, on in pairs)
        total = sum(off for off, _ in pairs) / sum(on for _, on in pairs)
        assert guessing.engine.speculator is not None
        stats = guessing.engine.speculator.stats
        print(
            f"round {number + 1}: {total:.3f}x by processor time; groups of {len(groups[0])} {ratios[0]:.3f}x to "
            f"{ratios[-1]:.3f}x; {stats.acceptance_rate:.0%} of {stats.num_draft_tokens} draft tokens accepted so far",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="stories")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--method", choices=SPECULATIVE_METHODS, default="ngram")
    parser.add_argument("--draft", help="a draft model, or the folder of an EAGLE-3 head")
    parser.add_argument("--fixed", action="store_true", help="no adaptive lengths")
    parser.add_argument("--paired", action="store_true", help="alternate single steps; use with --threads 1")
    parser.add_argument("--length", type=int, default=4)
    parser.add_argument("--count", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, nargs="+", help="prompts at once (1 and 16; with --paired 1)")
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--deterministic",
        action="store_true",
        help="on a GPU the rounding of other modes depends on the rows of a pass",
    )
    parser.add_argument("--num-blocks", type=int, help="of each engine's cache: on a GPU two engines share its memory")
    arguments = parser.parse_args()
    options: dict[str, Any] = {
        "device": arguments.device,
        "deterministic": arguments.deterministic,
        "num_blocks": arguments.num_blocks,
        "max_num_seqs": 16,
        "max_model_len": arguments.max_model_len,
        "threads": arguments.threads,
    }
    plain = LLM(arguments.model, **options)
    config = SpeculativeConfig(
        arguments.method, length=arguments.length, draft_model=arguments.draft, adaptive=not arguments.fixed
    )
    guessing = LLM(plain.model, speculative=config, **options)
    prompts = read_prompts(arguments.prompts, plain, arguments.count)
    for batch in arguments.batch or ([1] if arguments.paired else [1, 16]):
        groups = [prompts[first : first + batch] for first in range(0, len(prompts), batch)]
        if arguments.paired:
            paired(plain, guessing, groups, arguments.max_tokens, arguments.rounds)
            continue
        pairs = [compare(plain, guessing, group, arguments.max_tokens, arguments.rounds) for group in groups]
        tokens = sum(len(output) for first, _ in pairs for output in first.outputs)
        (off, off_cpu), (on, on_cpu) = (
            (sum(pair[side].seconds for pair in pairs), sum(pair[side].cpu_seconds for pair in pairs))
            for side in (0, 1)
        )
        assert guessing.engine.speculator is not None
        stats = guessing.engine.speculator.stats
        per_pass = 1 + stats.num_accepted_tokens / max(stats.num_drafts, 1)
        print(
            f"batch {batch:2}: {tokens / off:7.1f} tok/s plain, {tokens / on:7.1f} with {arguments.method}: "
            f"{off / on:.2f}x ({off_cpu / on_cpu:.2f}x by processor time); "
            f"{stats.acceptance_rate:.0%} of {stats.num_draft_tokens} draft tokens accepted so far, "
            f"{per_pass:.2f} tokens per pass with drafts",
            flush=True,
        )


if __name__ == "__main__":
    main()
