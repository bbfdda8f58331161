"""Blocks saved by sharing, as in the PagedAttention paper: parallel samples and beams over two length distributions.

    python -m benchmarks.tools.sharing [--model stories] [--requests 24]

A block held by several sequences counts once with sharing and once per sequence without. The saving is averaged over
all steps of all requests. Mean lengths are those of the paper's two data sets, ShareGPT-like (161 in, 338 out) and
Alpaca-like (19 in, 58 out), halved to fit a context of 512. The block size is halved too (8 tokens instead of 16), so
the ratio of lengths to block size, which determines the saving, is that of the paper.
"""

from __future__ import annotations

import argparse

import numpy as np

from bifolio import LLM, BeamSearchParams, SamplingParams
from bifolio.engine.engine import InferenceEngine

MEANS = {"ShareGPT-like": (161, 338), "Alpaca-like": (19, 58)}
PAPER = {  # per cent, from 2 to 6 sequences
    ("ShareGPT-like", "parallel"): (16, 30), ("ShareGPT-like", "beam"): (44, 66),
    ("Alpaca-like", "parallel"): (6, 9), ("Alpaca-like", "beam"): (37, 55),
}  # fmt: skip
SCALE = 0.5
BLOCK_SIZE = 8


def draw_lengths(rng: np.random.Generator, name: str, count: int, longest: int) -> list[tuple[int, int]]:
    """(prompt, output) lengths, log-normal around the means."""
    sizes = []
    for _ in range(count):
        prompt, output = (int(rng.lognormal(np.log(mean * SCALE) - 0.18, 0.6)) + 1 for mean in MEANS[name])
        output = max(min(output, longest - 17), 4)
        sizes.append((max(min(prompt, longest - output - 1), 1), output))
    return sizes


def saving(engine: InferenceEngine) -> float:
    """Run the queued requests; return the share of block references saved by sharing."""
    held = needed = 0
    while engine.has_work:
        engine.step()
        counts = engine.blocks.reference_counts()
        held += len(counts)
        needed += sum(counts.values())
    return 1 - held / needed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="stories")
    parser.add_argument("--requests", type=int, default=24)
    arguments = parser.parse_args()
    llm = LLM(arguments.model, block_size=BLOCK_SIZE, max_num_seqs=24, num_blocks=3000, enable_prefix_caching=False)
    engine, vocab = llm.engine, llm.model.config.vocab_size
    print(f"{'lengths':14} {'kind':9} {'sequences':>9} {'saved':>7}   paper (2 to 6 sequences)")
    for name in MEANS:
        for kind in ("parallel", "beam"):
            for width in (2, 4, 6):
                rng = np.random.default_rng(0)
                for number, (prompt, output) in enumerate(
                    draw_lengths(rng, name, arguments.requests, engine.config.max_model_len)
                ):
                    tokens = rng.integers(3, vocab, prompt).tolist()
                    if kind == "beam":
                        beams = BeamSearchParams(width, max_tokens=output, ignore_eos=True)
                        engine.add_beam_search(str(number), tokens, beams)
                    else:
                        samples = SamplingParams(n=width, max_tokens=output, ignore_eos=True, seed=number)
                        engine.add_request(str(number), tokens, samples)
                low, high = PAPER[name, kind]
                print(f"{name:14} {kind:9} {width:9} {saving(engine):7.1%}   {low} to {high} %", flush=True)


if __name__ == "__main__":
    main()
