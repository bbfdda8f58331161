"""A conversation with a hybrid model: tokens computed, and time to the first token, of each turn.

    python -m benchmarks.tools.turns [--model MODEL | --shape hybrid-S] [--history 4000] [--turns 20] [--plot PNG]

Each turn sends the whole conversation again, with a new message. Every fifth turn begins another conversation about a
part of the first prompt, each time a longer one. The conversations run on three engines: with the prefix cache, with
checkpoints at the ends of prompts and turns alone, and without a prefix cache. All answers must be equal. The picture
shows the tokens of each turn that were found and computed, and the checkpoints that exist after it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bifolio import LLM, SamplingParams
from bifolio.measure.figures import check_target, new_figure, plain_axes
from bifolio.measure.random_models import open_model

NEW = 5  # turns of a conversation
ENGINES = {
    "checkpoints": {},
    "no prefix cache": {"enable_prefix_caching": False},
}


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a conversation."""

    prompt: int  # tokens
    cached: int  # of those, found with their state
    seconds: float  # to the first token
    checkpoints: list[int]  # positions of the conversation with a state, after the turn
    output: list[int]


def converse(llm: LLM, first: list[int], messages: list[list[int]], num_tokens: int) -> list[Turn]:
    engine, history, turns = llm.engine, list(first), []
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    for number, message in enumerate(messages):
        if number % NEW == NEW - 1:
            history = first[: len(first) * (number + NEW) // (len(messages) + NEW)]
        history += message
        request = engine.add_request(f"turn {number}", history, params)
        while engine.has_work:
            engine.step()
        output = list(request.sequences[0].output_token_ids)
        metrics = request.metrics
        known = [*history, *output]
        turns.append(
            Turn(
                len(history),
                metrics.num_cached_tokens,
                metrics.time_to_first_token,
                _checkpoints(llm, known),
                output,
            )
        )
        history = known
    return turns


def _checkpoints(llm: LLM, tokens: list[int]) -> list[int]:
    """Positions of `tokens` that a request could begin at."""
    blocks, found, end = llm.engine.blocks, [], len(tokens)
    while end > 0 and (end := blocks.cached_prefix_length(tokens, max_cached=end)) > 0:
        found.append(end)
        end -= 1
    return found[::-1]


def draw(runs: dict[str, list[Turn]], path: Path, title: str) -> None:
    """Left: the turns of the first engine, token by token; right: tokens computed by each engine."""
    figure = new_figure(12, 5)
    figure.suptitle(title)
    left, right = figure.subplots(1, 2)
    turns = runs["checkpoints"]
    numbers = np.arange(1, len(turns) + 1)
    cached = np.array([turn.cached for turn in turns])
    prompts = np.array([turn.prompt for turn in turns])
    left.barh(numbers, cached, color="#9ecae1", label="found: keys, values and state")
    left.barh(numbers, prompts - cached, left=cached, color="#d62728", label="computed")
    for number, turn in zip(numbers, turns, strict=True):
        left.plot(turn.checkpoints, [number + 0.4] * len(turn.checkpoints), "k|", markersize=4)
    left.plot([], [], "k|", label="checkpoint")
    left.set(xlabel="tokens of the prompt", ylabel="turn", title="Prompts, with checkpoints of states")
    left.invert_yaxis()
    left.legend(loc="upper right", fontsize=8)
    for name, own in runs.items():
        right.plot(numbers, [turn.prompt - turn.cached for turn in own], "o-", markersize=3, label=name)
    right.set(xlabel="turn", ylabel="prompt tokens computed", title="Tokens computed per turn", yscale="log")
    right.legend(fontsize=8)
    left.set_yticks(numbers)
    right.set_xticks(numbers)
    for axes in (left, right):
        plain_axes(axes)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="file, folder or name of a hybrid model")
    parser.add_argument("--shape", default=None, help="random weights: hybrid-tiny or hybrid-S")
    parser.add_argument("--format", default="q8_0", help="format of random weights")
    parser.add_argument("--kernels", default=None, help="kernel set")
    for name, value in (("history", 4000), ("message", 60), ("answer", 40), ("turns", 20)):
        parser.add_argument(f"--{name}", type=int, default=value, help="tokens" if name != "turns" else "number")
    parser.add_argument("--plot", type=Path, help="picture to write")
    arguments = parser.parse_args()
    check_target(arguments.plot)
    shape = arguments.shape or (None if arguments.model else "hybrid-S")
    model = open_model(arguments.model, shape, arguments.format)
    generator, vocab = np.random.default_rng(0), model.config.vocab_size

    def words(count: int) -> list[int]:
        return [int(token) for token in generator.integers(3, vocab, count)]

    first, messages = words(arguments.history), [words(arguments.message) for _ in range(arguments.turns)]
    length = arguments.history + arguments.turns * (arguments.message + arguments.answer) + 1
    runs: dict[str, list[Turn]] = {}
    rows: dict[str, dict[str, Any]] = {}
    for name, options in ENGINES.items():
        llm = LLM(model, kernels=arguments.kernels, max_model_len=length, max_num_seqs=2, **options)  # type: ignore[arg-type]
        started = time.perf_counter()
        turns = runs[name] = converse(llm, first, messages, arguments.answer)
        later = turns[1:] or turns
        rows[name] = {
            "prompt_tokens": sum(turn.prompt for turn in turns),
            "computed_tokens": sum(turn.prompt - turn.cached for turn in turns),
            "median_first_token_ms": round(1000 * statistics.median(turn.seconds for turn in later), 1),
            "seconds": round(time.perf_counter() - started, 1),
            "state_bytes": llm.plan.state_bytes,
            "spacing": llm.engine.config.cache.checkpoint_tokens,
            "states": asdict(llm.engine.stats().states),
        }
    if any([turn.output for turn in turns] != [turn.output for turn in runs["checkpoints"]] for turns in runs.values()):
        sys.exit("the answers of the engines differ")
    print(json.dumps({"model": str(model.path), "turns": arguments.turns, "engines": rows}, indent=2))
    if arguments.plot is not None:
        draw(runs, arguments.plot, f"{model.path}: {arguments.turns} turns after {arguments.history} tokens")


if __name__ == "__main__":
    main()
