"""Overhead of beam search: its time relative to the same number of independent greedy sequences.

python benchmarks/beams.py [--model stories] [--width 4] [--prompts 8] [--length 128] [--new 128] [--rounds 3]
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from bifolio import LLM, BeamSearchParams, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="stories")
    for name, value in (("width", 4), ("prompts", 8), ("length", 128), ("new", 128), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    arguments = parser.parse_args()
    sequences = arguments.width * arguments.prompts
    llm = LLM(arguments.model, max_num_seqs=sequences, num_blocks=sequences * 40, token_budget=2048, chunk_size=512)
    rng, vocab = np.random.default_rng(0), llm.model.config.vocab_size
    prompts = [rng.integers(3, vocab, arguments.length).tolist() for _ in range(arguments.prompts)]
    others = [rng.integers(3, vocab, arguments.length).tolist() for _ in range(sequences)]
    beams = BeamSearchParams(arguments.width, max_tokens=arguments.new, ignore_eos=True)
    greedy = SamplingParams(temperature=0, max_tokens=arguments.new, ignore_eos=True)
    times: dict[str, list[float]] = {"beams": [], "greedy": []}
    for _ in range(arguments.rounds):
        llm.engine.blocks.drop_cached()
        started = time.perf_counter()
        llm.beam_search(prompts, beams, use_tqdm=False)
        times["beams"].append(time.perf_counter() - started)
        llm.engine.blocks.drop_cached()
        started = time.perf_counter()
        llm.generate(others, greedy, use_tqdm=False)
        times["greedy"].append(time.perf_counter() - started)
    searched, plain = statistics.median(times["beams"]), statistics.median(times["greedy"])
    print(f"{arguments.prompts} searches of width {arguments.width}: {searched:.2f} s")
    print(f"{sequences} greedy sequences:       {plain:.2f} s")
    print(f"ratio: {searched / plain:.2f}")


if __name__ == "__main__":
    main()
