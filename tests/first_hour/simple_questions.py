"""Ten simple questions to a small chat model, with the defaults of `bifolio chat`.

    python tests/first_hour/simple_questions.py SmolLM2-135M-Instruct.Q4_1.gguf

Each question is a conversation of its own. An answer is right if it contains one of the expected words, and as long as
needed if it ends by itself within LONGEST tokens.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

from bifolio import LLM

QUESTIONS = {
    "How many days are there in a week?": ("7", "seven"),
    "Which planet do we live on?": ("earth",),
    "How many legs does a dog have?": ("4", "four"),
    "What do cows eat?": ("grass",),
    "Name three primary colors.": ("red",),
    "At what temperature does water boil in Celsius?": ("100",),
    "Is the sun a star or a planet?": ("a star",),
    "What is the opposite of hot?": ("cold",),
    "What language is spoken in Brazil?": ("portuguese",),
    "What is the name of our galaxy?": ("milky way",),
}
LONGEST = 200  # tokens


class Answer(NamedTuple):
    question: str
    text: str
    num_tokens: int
    is_right: bool
    ended: bool  # by itself, within LONGEST tokens


def ask(llm: LLM, seed: int) -> list[Answer]:
    """Every question once, with the sampling defaults of the model."""
    answers = []
    for question, expected in QUESTIONS.items():
        params = llm.default_params(max_tokens=LONGEST, seed=seed)
        output = llm.chat([{"role": "user", "content": question}], params, use_tqdm=False)[0].outputs[0]
        is_right = any(word in output.text.lower() for word in expected)
        answers.append(Answer(question, output.text, len(output.token_ids), is_right, output.finish_reason == "stop"))
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--seeds", type=int, default=3, help="rounds of ten questions, with the seeds 0, 1, ...")
    arguments = parser.parse_args()
    llm = LLM(arguments.model, max_num_seqs=1)
    defaults = llm.default_params()
    print(f"temperature {defaults.temperature}, top_k {defaults.top_k}, top_p {defaults.top_p}, min_p {defaults.min_p}")
    for seed in range(arguments.seeds):
        answers = ask(llm, seed)
        right, ended = sum(answer.is_right for answer in answers), sum(answer.ended for answer in answers)
        print(f"seed {seed}: {right} of 10 right, {ended} of 10 ended by themselves within {LONGEST} tokens")
        for answer in answers:
            text = " ".join(answer.text.split())
            print(f"  {'+' if answer.is_right else '-'} {answer.question} ({answer.num_tokens}) {text}")


if __name__ == "__main__":
    main()
