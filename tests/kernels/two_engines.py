"""Two engines with pools of their own, each on a thread, in one process: their outputs are those of each alone.

    scripts/sanitize-threads    runs this program under ThreadSanitizer

A third engine is made and ended again and again meanwhile, so that pools come and go beside running ones.
"""

from __future__ import annotations

import sys
import threading

from bifolio import SamplingParams
from bifolio.kernels.interface import KernelSet
from bifolio.kernels.select import select_kernels
from helpers import drain, make_engine, output_ids, random_prompt

ROUNDS = 6


def generate(kernels: KernelSet) -> list[list[list[int]]]:
    """Greedy and sampled tokens of a mixed batch."""
    engine = make_engine(kernels=kernels, max_num_seqs=6, num_blocks=200, max_model_len=80, chunk_size=16)
    requests = [
        engine.add_request(
            str(number),
            random_prompt(5 + 7 * number, seed=number, vocab_size=61),
            SamplingParams(
                max_tokens=12, temperature=0.9 * (number % 2), seed=number, n=1 + number % 2, ignore_eos=True
            ),
        )
        for number in range(4)
    ]
    drain(engine)
    return [output_ids(request) for request in requests]


def new_kernels(threads: int) -> KernelSet:
    return select_kernels("cpu", name="native", threads=threads)


def main() -> int:
    expected = generate(new_kernels(1))
    wrong: list[str] = []
    running = [True]

    def run(name: str, threads: int) -> None:
        kernels = new_kernels(threads)
        wrong.extend(name for _ in range(ROUNDS) if generate(kernels) != expected)

    def come_and_go() -> None:
        while running[0]:
            if generate(new_kernels(2)) != expected:
                wrong.append("short-lived")

    others = [threading.Thread(target=run, args=(name, count)) for name, count in (("first", 2), ("second", 3))]
    guest = threading.Thread(target=come_and_go)
    for thread in (*others, guest):
        thread.start()
    for thread in others:
        thread.join()
    running[0] = False
    guest.join()
    print(f"{2 * ROUNDS} runs of two engines beside a third: {len(wrong)} differ")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
