"""Monte-Carlo tree search over reasoning steps: a node is a branch, its children are forks with one step more.

python examples/tree_search.py "One day a boy lost his ball." --simulations 12

A simulation walks down by upper confidence bounds, adds a step to the node that it reaches, and reports the value of
the new node to all nodes above. Nodes share the computed tokens of their parents, so a simulation computes one step.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from bifolio import LLM, Branch, SamplingParams

Value = Callable[[Branch], float]  # of a partial answer, from 0 to 1
STEP = SamplingParams(temperature=1.0, max_tokens=24, stop=(".",), include_stop_str_in_output=True)
EXPLORATION = 1.0


@dataclass
class Node:
    branch: Branch
    depth: int = 0
    visits: int = 0
    total: float = 0.0
    children: list[Node] = field(default_factory=list)

    @property
    def mean(self) -> float:
        return self.total / self.visits if self.visits else 0.0

    def chosen(self) -> Node:
        """The child with the largest upper confidence bound."""
        log_visits = math.log(self.visits)
        return max(self.children, key=lambda child: child.mean + EXPLORATION * math.sqrt(log_visits / child.visits))


def finds_it(branch: Branch) -> float:
    """How likely the story says next that the ball was found, between 0 and 1."""
    [score] = branch.score([" He found"])
    return math.exp(score.total / len(score.token_ids))


def search(llm: LLM, prompt: str, simulations: int, value: Value, width: int = 3, depth: int = 3) -> tuple[Node, str]:
    """The root of the tree, and the text along the children with the most visits."""
    root = Node(llm.open(prompt))
    for number in range(simulations):
        path = [root]
        while len(path[-1].children) == width and path[-1].depth < depth:
            path.append(path[-1].chosen())
        if path[-1].depth < depth:
            [fork] = path[-1].branch.fork()
            fork.generate(replace(STEP, seed=number))
            child = Node(fork, path[-1].depth + 1)
            path[-1].children.append(child)
            path.append(child)
        worth = value(path[-1].branch)
        for node in path:
            node.visits += 1
            node.total += worth
    best = root
    while best.children:
        best = max(best.children, key=lambda child: child.visits)
    return root, best.branch.text


def close(node: Node) -> None:
    """Give the blocks of a tree back."""
    for child in node.children:
        close(child)
    node.branch.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default="One day a boy lost his ball.")
    parser.add_argument("--model", help="a folder, a GGUF file or a name; default: the embedded model")
    parser.add_argument("--simulations", type=int, default=8)
    arguments = parser.parse_args()
    with LLM(arguments.model) as llm:
        root, text = search(llm, arguments.prompt, arguments.simulations, finds_it)
        print(f"{root.visits} simulations, mean value {root.mean:.3f}")
        print(text)
        close(root)


if __name__ == "__main__":
    main()
