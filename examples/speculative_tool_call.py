"""Speculative tool calls: while a tool runs, a fork already answers with the result that is expected.

python examples/speculative_tool_call.py

If the tool returns the expected result, the answer is there. Otherwise the fork is closed, and the answer is computed
from the real result; the conversation before it is computed once either way.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from bifolio import LLM, SamplingParams

CONVERSATION = "Tom asked: what colour is the sky? Sam looked out of the window. Sam said: the sky is"
ANSWER = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def answer(llm: LLM, conversation: str, expected: str, tool: Callable[[], str]) -> tuple[str, bool]:
    """(the conversation with the tool's result and the answer, whether the expected result was right)."""
    with llm.open(conversation) as root, ThreadPoolExecutor(1) as pool:
        running = pool.submit(tool)
        [guess] = root.fork()
        guess.append(expected).generate(ANSWER)
        result = running.result()
        if result == expected:
            with guess:
                return guess.text, True
        guess.close()
        root.append(result).generate(ANSWER)
        return root.text, False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder, a GGUF file or a name; default: the embedded model")
    parser.add_argument("--result", default=" blue", help="what the tool finds; ' blue' is expected")
    arguments = parser.parse_args()

    def look() -> str:
        time.sleep(0.2)
        result: str = arguments.result
        return result

    with LLM(arguments.model) as llm:
        text, was_right = answer(llm, CONVERSATION, " blue", look)
        print("the expected result was right" if was_right else "the answer was computed again")
        print(text)


if __name__ == "__main__":
    main()
