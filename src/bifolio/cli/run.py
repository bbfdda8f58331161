"""`bifolio run`: from a name to a conversation or a text in one command."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

from bifolio.cli import commands, options

if TYPE_CHECKING:
    from bifolio.api.llm import LLM
    from bifolio.sampling_params import SamplingParams

HELP = """Run a model by name: fetch it if it is not here, then chat with it.

With a PROMPT (or piped text) it answers once. A model without a chat template continues the prompt."""
EPILOG = """Examples:

  bifolio run smollm2

  bifolio run smollm2 "What is the capital of France?"

  bifolio run stories "Once upon a time" """


def register(app: commands.App) -> None:
    app.command("run", help=HELP, epilog=EPILOG)(run)


def run(
    sampling: options.Sampling,
    engine: options.Engine,
    model: Annotated[str, commands.argument(help="Model folder, .gguf file, or a name that `bifolio pull` takes.")],
    prompt: Annotated[str | None, commands.argument(help="Question, or text to continue.")] = None,
    system: Annotated[str | None, commands.option("--system", "-s", help="The system prompt.")] = None,
) -> None:
    from bifolio.cli.conversation import ANSWER_TOKENS, Conversation
    from bifolio.cli.generate import given_text

    text = given_text(prompt)
    llm = engine.llm(fetched(model), max_num_seqs=1)
    params = llm.default_params(**{"max_tokens": ANSWER_TOKENS, **sampling.explicit()})
    if llm.model.chat_template is None and system is not None:
        raise commands.BadParameter("--system has no effect: the model has no chat template; leave it out")
    if llm.model.chat_template is None:
        continue_text(llm, text, params)
    elif text is not None:
        answer_once(llm, text, params, system)
    else:
        from bifolio.cli.chat import converse

        converse(Conversation(llm, params, system))


def fetched(model: str) -> str:
    """The model, after it was pulled if it is not here and its name says where to find it."""
    from pathlib import Path

    from bifolio.model.references import normalised
    from bifolio.model.registry import PULLABLE, find_model

    if Path(model).expanduser().exists() or find_model(model) is not None:
        return model
    if model in PULLABLE or normalised(model) is not None:
        from bifolio.cli.pull import fetch

        return str(fetch(model))
    return model


def continue_text(llm: LLM, text: str | None, params: SamplingParams) -> None:
    from bifolio.cli.generate import STORY, run_one

    run_one(llm, STORY if text is None else text, params, echo=text is None or sys.stdout.isatty(), as_json=False)


def answer_once(llm: LLM, text: str, params: SamplingParams, system: str | None) -> None:
    messages = [{"role": "system", "content": system}] if system else []
    prompt = {"prompt_token_ids": llm.chat_tokens([*messages, {"role": "user", "content": text}])}
    for result in llm.stream(prompt, params):
        sys.stdout.write(result.text)
        sys.stdout.flush()
    sys.stdout.write("\n")
