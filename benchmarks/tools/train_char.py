"""Training time of a small character model on this machine: 2,000 steps of the preset `char`.

    python -m benchmarks.tools.train_char tinyshakespeare.txt [--steps 2000]

Prints the held-out loss, the wall time and the CPU time, which is comparable on a busy machine.
The goal is a loss below 1.9 in under 10 minutes on 2 CPU cores.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time

import torch

from bifolio.train import TrainSettings, train


def main(text: str, steps: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainSettings(
            data=(text,),
            output=folder,
            preset="char",
            tokenizer="char",
            steps=steps,
            batch_size=12,
            learning_rate=2e-3,
            eval_fraction=0.1,
            eval_every=500,
            eval_sequences=200,
            sample_every=0,
            save_every=0,
            device="cpu",
        )
        result = train(settings)
    step, loss = result.history.held_out[-1]
    minutes = result.history.seconds / 60
    threads, load = torch.get_num_threads(), os.getloadavg()[1]
    print(f"{step} steps: held-out loss {loss:.3f} in {minutes:.1f} minutes on {threads} threads")
    print(f"{time.process_time() / 60:.1f} minutes of CPU time; load average over 5 minutes {load:.1f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", help="text to learn from, plain or .xz")
    parser.add_argument("--steps", type=int, default=2000)
    arguments = parser.parse_args()
    main(arguments.text, arguments.steps)
