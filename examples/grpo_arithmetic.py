"""GRPO on small sums, on a CPU: the engine answers, `LanguageModel` learns from rewards, the engine takes its weights.

python examples/grpo_arithmetic.py --steps 40 --plot reward.svg

A question is a story: "Tom had two apples. Mom gave him three more. Now Tom had". The reward of an answer is 1 if it
begins with the right number and a little for any other number. The engine's logprobs of the answers are those of
`LanguageModel` to the last bit, so the ratio of both policies is exactly 1 where an update begins.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from bifolio import LLM, LanguageModel, SamplingParams
from bifolio.model.huggingface.folder_writer import write_folder
from bifolio.model.loader import load_model
from bifolio.model.registry import DEFAULT_MODEL
from bifolio.quant.formats import QuantFormat

NUMBERS = ("zero", "one", "two", "three", "four", "five", "six")
QUESTION = "Tom had {} apples. Mom gave him {} more. Now Tom had"
LARGEST = 3  # of the two numbers
PARTIAL_REWARD = 0.1  # of a wrong number
GROUP = 16  # answers to a question: their mean reward is the baseline of each
CLIP = 0.2  # largest change of a ratio that is rewarded
SAMPLING = SamplingParams(temperature=1.0, max_tokens=2, ignore_eos=True, logprobs=0, n=GROUP)


@dataclass(frozen=True)
class Answer:
    """One rollout: tokens of the question and of the answer, with the engine's logprobs of the latter."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    reward: float
    advantage: float = 0.0


@dataclass(frozen=True)
class Step:
    """The rollouts of one update in numbers."""

    reward: float  # the mean
    accuracy: float  # share of right answers
    difference: float  # largest, between the logprobs of the engine and those of `LanguageModel`


def questions() -> dict[str, int]:
    """The right answer to each question."""
    sizes = range(1, LARGEST + 1)
    return {QUESTION.format(NUMBERS[a], NUMBERS[b]): a + b for a in sizes for b in sizes}


def reward(text: str, right: int) -> float:
    """The value of an answer."""
    first = (text.split() or [""])[0].strip(".,!")
    return 1.0 if first == NUMBERS[right] else PARTIAL_REWARD if first in NUMBERS else 0.0


def rollouts(llm: LLM, seed: int) -> list[Answer]:
    """A group of answers to each question, with their advantages within the group."""
    asked, found = questions(), []
    params = [replace(SAMPLING, seed=seed * len(asked) + number) for number in range(len(asked))]
    for output, right in zip(llm.generate(list(asked), params, use_tqdm=False), asked.values(), strict=True):
        group = [
            Answer(
                output.prompt_token_ids,
                completion.token_ids,
                [entry.logprob for entry in completion.logprobs or []],
                reward(completion.text, right),
            )
            for completion in output.outputs
        ]
        rewards = torch.tensor([answer.reward for answer in group])
        advantages = ((rewards - rewards.mean()) / (rewards.std() + 1e-4)).tolist()
        found += [replace(answer, advantage=value) for answer, value in zip(group, advantages, strict=True)]
    return found


def loss_of(model: LanguageModel, answers: list[Answer]) -> tuple[torch.Tensor, float]:
    """GRPO's loss, and the largest difference between the logprobs of both policies."""
    rows = [torch.tensor([*answer.prompt, *answer.tokens]) for answer in answers]
    scored = model.token_logprobs(torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), exact=True)
    terms, difference = [], 0.0
    for row, answer in zip(scored, answers, strict=True):
        begin = len(answer.prompt) - 1
        logprobs, sampled = row[begin : begin + len(answer.tokens)], torch.tensor(answer.logprobs)
        difference = max(difference, float((logprobs.detach() - sampled).abs().max()))
        ratio = (logprobs - sampled).exp()
        terms.append(-torch.minimum(ratio * answer.advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * answer.advantage))
    return torch.cat(terms).mean(), difference


def train(llm: LLM, model: LanguageModel, steps: int, rate: float, report: Callable[[int, Step], None]) -> list[Step]:
    """Answer, update and hand over the weights, `steps` times."""
    optimizer, history = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.0), []
    for number in range(steps):
        answers = rollouts(llm, number)
        loss, difference = loss_of(model, answers)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        llm.load_weights((name, parameter) for name, parameter in model.named_parameters())
        rewards = [answer.reward for answer in answers]
        history.append(Step(sum(rewards) / len(rewards), rewards.count(1.0) / len(rewards), difference))
        report(number, history[-1])
    return history


def plot(history: list[Step], path: str) -> None:
    """Draw the reward and the share of right answers."""
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 3.5), layout="constrained")
    axis.plot([step.reward for step in history], label="mean reward")
    axis.plot([step.accuracy for step in history], label="right answers")
    axis.set(xlabel="update", ylim=(0, 1))
    axis.legend()
    axis.grid(alpha=0.3)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a folder, a GGUF file or a name; default: the embedded")
    parser.add_argument("--steps", type=int, default=40, help="number of updates")
    parser.add_argument("--rate", type=float, default=1e-4, help="learning rate")
    parser.add_argument("--plot", help="write a picture of the rewards to this .svg or .png file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        exact = Path(folder) / "exact"  # both policies hold the same parameters in float32
        write_folder(exact, load_model(arguments.model), QuantFormat.F32)
        with LLM(exact, max_model_len=64, max_num_seqs=2 * GROUP) as llm:
            history = train(
                llm, LanguageModel.from_pretrained(exact), arguments.steps, arguments.rate,
                lambda number, step: print(
                    f"update {number:3d}: reward {step.reward:.3f}, right {step.accuracy:.1%}, "
                    f"largest difference of logprobs {step.difference:g}", flush=True
                ),
            )  # fmt: skip
    if arguments.plot:
        plot(history, arguments.plot)


if __name__ == "__main__":
    main()
