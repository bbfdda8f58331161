"""Best of n: several answers over one computed prompt, and a scorer that chooses between them.

python examples/best_of_n.py "Once upon a time there was a dog" --n 8
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace

from bifolio import LLM, Branch, SamplingParams

Scorer = Callable[[Branch], float]  # larger is better


def ends_well(branch: Branch) -> float:
    """The logprob of a happy end behind the answer: the model itself is the judge, and the branch stays as it is."""
    [score] = branch.score([" They were all very happy."])
    return score.total


def best_of_n(llm: LLM, prompt: str, n: int, scorer: Scorer, params: SamplingParams) -> list[tuple[float, str]]:
    """(score, text) of n answers, the best first. The prompt is computed once."""
    found = []
    with llm.open(prompt) as root:
        for seed, branch in enumerate(root.fork(n)):
            with branch:
                answer = branch.generate(replace(params, seed=seed)).outputs[0].text
                found.append((scorer(branch), answer))
    return sorted(found, key=lambda item: -item[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default="Once upon a time there was a little dog")
    parser.add_argument("--model", help="a folder, a GGUF file or a name; default: the embedded model")
    parser.add_argument("--n", type=int, default=4)
    arguments = parser.parse_args()
    with LLM(arguments.model) as llm:
        params = SamplingParams(temperature=0.9, max_tokens=40)
        for score, text in best_of_n(llm, arguments.prompt, arguments.n, ends_well, params):
            print(f"{score:8.2f} {text!r}")


if __name__ == "__main__":
    main()
