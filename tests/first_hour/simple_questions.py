"""Ten simple questions to the model of `bifolio pull smollm2`, with the sampling defaults that come with it.

    bifolio pull smollm2
    python tests/first_hour/simple_questions.py smollm2

The questions were written down before the model was asked. Each is a conversation of its own. An answer is right if its
first SOON words contain an expected one, and no longer than needed if it ends by itself within LONGEST tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import NamedTuple

from bifolio import LLM

QUESTIONS = {
    "What is the capital of France?": ("paris",),
    "What is 2 + 2?": ("4", "four"),
    "What color is the sky on a clear day?": ("blue",),
    "How many days are there in a week?": ("7", "seven"),
    "What is the opposite of hot?": ("cold",),
    "Which planet do we live on?": ("earth",),
    "What is the largest ocean on Earth?": ("pacific",),
    "Who wrote Romeo and Juliet?": ("shakespeare",),
    "What do bees make?": ("honey",),
    "What is the chemical formula of water?": ("h2o", "h₂o"),
}
OTHERS = {
    "What is the capital of Italy?": ("rome",),
    "How many months are in a year?": ("12", "twelve"),
    "What color is grass?": ("green",),
    "What is 5 + 3?": ("8", "eight"),
    "How many legs does a spider have?": ("8", "eight"),
    "What is the largest planet in our solar system?": ("jupiter",),
    "What do plants need to grow?": ("water", "light"),
    "Who was the first president of the United States?": ("washington",),
    "What is the opposite of big?": ("small", "little"),
    "What language is spoken in Spain?": ("spanish",),
    "What is frozen water called?": ("ice",),
    "How many hours are in a day?": ("24", "twenty-four"),
    "What animal says meow?": ("cat",),
    "Where does the sun rise?": ("east",),
    "What is the fastest land animal?": ("cheetah",),
    "What do you use to write on a blackboard?": ("chalk",),
    "What gas do humans need to breathe?": ("oxygen",),
    "How many continents are there?": ("7", "seven"),
    "What is the tallest mountain in the world?": ("everest",),
    "What fruit is yellow and curved?": ("banana",),
}
LONGEST = 400  # tokens
SOON = 50  # words in which a right answer names the expected one


class Answer(NamedTuple):
    question: str
    text: str
    num_tokens: int
    is_right: bool
    ended: bool  # by itself, within LONGEST tokens


def ask(llm: LLM, seed: int, questions: Mapping[str, tuple[str, ...]] = QUESTIONS) -> list[Answer]:
    """Every question once, with the sampling defaults of the model."""
    answers = []
    conversations = [[{"role": "user", "content": question}] for question in questions]
    outputs = llm.chat(conversations, llm.default_params(max_tokens=LONGEST, seed=seed), use_tqdm=False)
    for (question, expected), (output,) in zip(questions.items(), (each.outputs for each in outputs), strict=True):
        beginning = " ".join(output.text.lower().split()[:SOON])
        is_right = any(word in beginning for word in expected)
        answers.append(Answer(question, output.text, len(output.token_ids), is_right, output.finish_reason == "stop"))
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--seeds", type=int, default=3, help="rounds of all questions, with the seeds 0, 1, ...")
    parser.add_argument("--others", action="store_true", help="twenty other questions instead of the ten")
    parser.add_argument("--activations", default="auto", help="as of `bifolio chat`")
    arguments = parser.parse_args()
    questions = OTHERS if arguments.others else QUESTIONS
    llm = LLM(arguments.model, max_num_seqs=len(questions), activations=arguments.activations)
    defaults = llm.default_params()
    names = ("temperature", "top_k", "top_p", "min_p", "dry_multiplier")
    print(", ".join(f"{name} {getattr(defaults, name)}" for name in names))
    for seed in range(arguments.seeds):
        answers = ask(llm, seed, questions)
        right, ended = sum(answer.is_right for answer in answers), sum(answer.ended for answer in answers)
        print(f"seed {seed}: {right} of {len(answers)} right, {ended} ended by themselves within {LONGEST} tokens")
        for answer in answers:
            text = " ".join(answer.text.split())
            print(f"  {'+' if answer.is_right else '-'} {answer.question} ({answer.num_tokens}) {text}")


if __name__ == "__main__":
    main()
