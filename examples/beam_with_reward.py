"""Beam search over steps with a process reward: after each step the partial answers with the best rewards go on.

python examples/beam_with_reward.py "Once upon a time there was a cat" --beams 3 --steps 3
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace

from bifolio import LLM, Branch, SamplingParams

Reward = Callable[[Branch], float]  # of a partial answer; larger is better
STEP = SamplingParams(temperature=0.9, max_tokens=24, stop=(".",), include_stop_str_in_output=True)  # a sentence


def names_a_friend(branch: Branch) -> float:
    """How likely the next word is a friend's: the reward of the step before."""
    [score] = branch.score([" The friend"])
    return score.total


def beam_search(llm: LLM, prompt: str, beams: int, steps: int, reward: Reward) -> list[tuple[float, str]]:
    """(reward, text) of the last beams, the best first. Each step is computed once, however many beams share it."""
    living = [llm.open(prompt)]
    found: list[tuple[float, str]] = []
    for step in range(steps):
        rated: list[tuple[float, Branch]] = []
        for parent in living:
            for number, child in enumerate(parent.fork(beams)):
                child.generate(replace(STEP, seed=1000 * step + number))
                rated.append((reward(child), child))
            parent.close()
        rated.sort(key=lambda item: -item[0])
        for _, dropped in rated[beams:]:
            dropped.close()
        living = [branch for _, branch in rated[:beams]]
        found = [(score, branch.text) for score, branch in rated[:beams]]
    for branch in living:
        branch.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default="Once upon a time there was a cat.")
    parser.add_argument("--model", help="a folder, a GGUF file or a name; default: the embedded model")
    parser.add_argument("--beams", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2)
    arguments = parser.parse_args()
    with LLM(arguments.model) as llm:
        found = beam_search(llm, arguments.prompt, arguments.beams, arguments.steps, names_a_friend)
        for score, text in found:
            print(f"{score:8.2f} {text!r}")


if __name__ == "__main__":
    main()
