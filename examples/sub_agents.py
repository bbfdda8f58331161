"""Sub-agents from one context: each works on a fork of the conversation, and only its report joins the main branch.

python examples/sub_agents.py --model smollm2
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from bifolio import LLM, SamplingParams

CONTEXT = "A girl named Mia and her dog Max went to the park. They saw a big tree, a small pond and a red kite."
TASKS = {"names": " The names are", "places": " In the park there was", "colours": " The kite was"}


def delegate(llm: LLM, context: str, tasks: Mapping[str, str], params: SamplingParams) -> tuple[dict[str, str], str]:
    """(report of each task, the main branch with all reports). The context is computed once, for all of them."""
    reports = {}
    with llm.open(context) as main:
        for (name, task), agent in zip(tasks.items(), main.fork(len(tasks)), strict=True):
            with agent:
                reports[name] = agent.append(task).generate(params).outputs[0].text
        main.append(summary(tasks, reports))
        return reports, main.text


def summary(tasks: Mapping[str, str], reports: Mapping[str, str]) -> str:
    """The reports as one text."""
    lines: Sequence[str] = [f"{task}{reports[name]}" for name, task in tasks.items()]
    return "".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder, a GGUF file or a name; default: the embedded model")
    arguments = parser.parse_args()
    with LLM(arguments.model) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=16, stop=(".",), include_stop_str_in_output=True)
        reports, text = delegate(llm, CONTEXT, TASKS, params)
        for name, report in reports.items():
            print(f"{name}:{report}")
        print(text)


if __name__ == "__main__":
    main()
