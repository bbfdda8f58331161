"""The tree search of `examples/` over branches, and over calls that each send their whole text.

    python -m benchmarks.tools.tree_search -m stories --context 380 --simulations 24

Runs take turns. Both searches visit the same nodes and find the same text, which is checked. Calls without state are
measured with the engine's prefix cache and without it, as a server that keeps nothing between calls.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bifolio import LLM, SamplingParams
from bifolio.api.outputs import Score

EXAMPLE = Path(__file__).parents[2] / "examples" / "tree_search.py"
STORY = "One day a boy lost his ball. He looked for it in the garden and in the house, and he asked his sister. "
SCORING = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=0)


@dataclass
class Text:
    """The verbs of a branch that the search calls, by requests that send all tokens."""

    llm: LLM
    token_ids: list[int]

    @property
    def text(self) -> str:
        return str(self.llm.get_tokenizer().decode(self.token_ids, skip_special_tokens=True))

    def fork(self) -> list[Text]:
        return [Text(self.llm, list(self.token_ids))]

    def generate(self, params: SamplingParams) -> None:
        [output] = self.llm.generate({"prompt_token_ids": self.token_ids}, params, use_tqdm=False)
        self.token_ids += output.outputs[0].token_ids

    def score(self, continuations: Sequence[str]) -> list[Score]:
        tokenizer = self.llm.get_tokenizer()
        each = [tokenizer.encode(text, add_special_tokens=False) for text in continuations]
        prompts: list[Any] = [{"prompt_token_ids": [*self.token_ids, *tokens]} for tokens in each]
        found = []
        for tokens, output in zip(each, self.llm.generate(prompts, SCORING, use_tqdm=False), strict=True):
            scored = [entry for entry in output.prompt_logprobs or [] if entry is not None][-len(tokens) :]
            found.append(Score(tokens, [entry.logprob for entry in scored], [entry.rank for entry in scored]))
        return found

    def close(self) -> None:
        pass


@dataclass
class Stateless:
    """An `LLM` whose branches are texts."""

    llm: LLM

    def open(self, prompt: str) -> Text:
        return Text(self.llm, self.llm.get_tokenizer().encode(prompt))


def example() -> Any:
    """The module of the example."""
    spec = importlib.util.spec_from_file_location("tree_search_example", EXAMPLE)
    if spec is None or spec.loader is None:
        raise RuntimeError(f"{EXAMPLE} cannot be read")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def context_of(llm: LLM, num_tokens: int) -> str:
    """A story of about so many tokens, which ends with a sentence."""
    tokenizer = llm.get_tokenizer()
    return STORY * max(num_tokens // len(tokenizer.encode(STORY, add_special_tokens=False)), 1)


def measure(module: Any, caller: Any, prompt: str, simulations: int) -> tuple[float, str, float]:
    """Seconds of one search, the text that it found, and the mean value of the root."""
    began = time.perf_counter()
    root, text = module.search(caller, prompt, simulations, module.finds_it)
    seconds = time.perf_counter() - began
    module.close(root)
    return seconds, text, root.mean


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", default="stories")
    parser.add_argument("--context", type=int, default=380, help="tokens of the text before the search")
    parser.add_argument("--simulations", type=int, default=24)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    module, seconds, outcomes = example(), dict[str, list[float]](), set[tuple[str, float]]()
    with (
        LLM(arguments.model, threads=arguments.threads) as cached,
        LLM(arguments.model, threads=arguments.threads, enable_prefix_caching=False) as bare,
    ):
        prompt = context_of(cached, arguments.context)
        callers = {
            "branches": bare,
            "calls": Stateless(bare),
            "calls, prefix cache": Stateless(cached),
        }
        for _ in range(arguments.repetitions):
            for name, caller in callers.items():
                cached.reset_prefix_cache()
                taken, text, mean = measure(module, caller, prompt, arguments.simulations)
                seconds.setdefault(name, []).append(taken)
                outcomes.add((text, mean))
    if len(outcomes) != 1:
        raise RuntimeError(f"the searches found {len(outcomes)} outcomes: they must be equal")
    middle = {name: statistics.median(every) for name, every in seconds.items()}
    for name, value in middle.items():
        row = {"kind": name, "seconds": round(value, 3), "to_branches": round(value / middle["branches"], 2)}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
