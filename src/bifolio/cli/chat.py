"""`bifolio chat`: a conversation in the terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from bifolio.cli import commands, options

if TYPE_CHECKING:
    from bifolio.api.llm import LLM
    from bifolio.cli.conversation import Conversation
    from bifolio.cli.terminal import Terminal
    from bifolio.sequence import Request

HELP = """Chat with a model.

Answers stream as they are generated. /help lists the commands: /set, /system, /regenerate, /branch, /save, /load,
/reset, /bye. A pasted text of several lines is one message; so is a text between triple quotes. Earlier turns stay in
the prefix cache, so a long conversation does not get slower to continue. With piped input, every line is a turn and
only the answers go to standard output."""
EPILOG = """Examples:

  bifolio chat -m ./SmolLM2-135M-Instruct.gguf

  bifolio chat -m ./model --system "You answer in one sentence." --temperature 0.7

  bifolio chat -m ./model --session plans.session

  echo "What is the capital of France?" | bifolio chat -m ./model --temperature 0"""


def register(app: commands.App) -> None:
    app.command("chat", help=HELP, epilog=EPILOG)(chat)


def chat(
    sampling: options.Sampling,
    engine: options.Engine,
    model: options.Model = None,
    lora: options.Lora = None,
    system: Annotated[str | None, commands.option("--system", "-s", help="The system prompt.")] = None,
    context_policy: Annotated[
        str,
        commands.option(
            "--context-policy",
            help="When the context is full: drop (the oldest turns), summarise (them) or stop.",
        ),
    ] = "drop",
    session: Annotated[
        Path | None,
        commands.option("--session", help="File of the conversation: continued if it exists, written at the end."),
    ] = None,
    markdown: Annotated[bool, commands.option(help="Render markdown and wrap words on a terminal.")] = True,
    as_json: Annotated[bool, commands.option("--json", help="Print each answer as a line of JSON.")] = False,
    verbose: options.Verbose = False,
) -> None:
    from bifolio.cli.conversation import ANSWER_TOKENS, Conversation, checked_policy

    checked_policy(context_policy)
    llm = engine.llm(model, lora, max_num_seqs=1, verbose=verbose)
    params = llm.default_params(**{"max_tokens": ANSWER_TOKENS, **sampling.explicit()})
    conversation = Conversation(llm, params, system, context_policy)
    conversation.check()
    if session is None:
        converse(conversation, markdown, as_json)
        return
    resume(conversation, session)
    try:
        converse(conversation, markdown, as_json)
    finally:
        commands.echo(conversation.save(str(session), with_blocks=True), err=True)


def resume(conversation: Conversation, session: Path) -> None:
    """Continue the conversation of a file, if there is one."""
    from bifolio.errors import ConfigError

    if not session.expanduser().exists():
        return
    if conversation.system is not None:
        raise ConfigError("--system is for a new conversation, and the file of --session exists: leave one of them out")
    commands.echo(conversation.load_session(str(session)), err=True)


def converse(conversation: Conversation, markdown: bool = True, as_json: bool = False) -> None:
    """Read messages and commands until the input ends."""
    from bifolio.cli.chat_commands import obey
    from bifolio.cli.dropped_files import dropped_images
    from bifolio.cli.terminal import Terminal

    llm = conversation.llm
    terminal = Terminal(not as_json and sys.stdin.isatty() and sys.stdout.isatty(), markdown)
    terminal.welcome(f"{llm.model.path.name} on {llm.engine.runner.kernels.name} kernels")
    for line in terminal.lines():
        images, text = dropped_images(line)
        if images:
            are_kept = show_all(images, conversation, terminal)
            if are_kept and text:
                answer(text, conversation, terminal, as_json)
        elif not line.startswith("/"):
            answer(line, conversation, terminal, as_json)
        elif not obey(line, conversation, terminal, lambda: answer(None, conversation, terminal, as_json)):
            break


def show_all(images: list[Path], conversation: Conversation, terminal: Terminal) -> bool:
    """Keep dropped images for the next message; whether all are."""
    before = len(conversation.images)
    for image in images:
        terminal.note(conversation.show(str(image)))
    return len(conversation.images) == before + len(images)


def answer(line: str | None, conversation: Conversation, terminal: Terminal, as_json: bool = False) -> None:
    """Run one turn (None: the last one again). A refused turn leaves the conversation unchanged."""
    from bifolio.errors import RequestError

    progress = Progress(conversation.llm)
    try:
        if as_json:
            request = ask(line, conversation, lambda text: None)
        else:
            with terminal.answer(progress.line) as write:
                request = ask(line, conversation, progress.counted(write))
    except RequestError as error:
        terminal.note(f"{error}. /reset starts over.")
        return
    if as_json:
        commands.echo(json.dumps(as_record(request), ensure_ascii=False))
    for note in conversation.notes:
        terminal.note(note)
    terminal.note(summary(request, conversation.llm))


def ask(line: str | None, conversation: Conversation, write: Callable[[str], None]) -> Request:
    return conversation.regenerate(write) if line is None else conversation.turn(line, write)


def as_record(request: Request) -> dict[str, object]:
    (sequence,) = request.sequences
    return {
        "role": "assistant",
        "content": sequence.text,
        "finish_reason": None if sequence.finish_reason is None else sequence.finish_reason.value,
        "prompt_tokens": len(request.prompt_token_ids),
        "completion_tokens": len(sequence.output_token_ids),
        "cached_tokens": request.metrics.num_cached_tokens,
    }


class Progress:
    """The status line while an answer streams: speed, and the share of the context in use."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._began = 0.0  # when the first piece came
        self._num_pieces = 0
        self._now = 0.0
        self._held = 0  # tokens of the context; the last count stays when the request has left the engine

    def counted(self, write: Callable[[str], None]) -> Callable[[str], None]:
        import time

        def counting(text: str) -> None:
            self._began = self._began or time.perf_counter()
            self._num_pieces += 1
            self._now = time.perf_counter()
            write(text)

        return counting

    def line(self) -> str:
        elapsed = self._now - self._began if self._num_pieces > 1 else 0.0
        speed = f"{(self._num_pieces - 1) / elapsed:.1f} tok/s" if elapsed else "-"
        self._held = max(self._held, sum(len(r.prompt_token_ids) + len(r.sequences[0].output_token_ids)
                                         for r in self._llm.engine.requests.values()))  # fmt: skip
        return f"{speed} · context {self._held} of {self._llm.engine.config.max_model_len}"


def summary(request: Request, llm: LLM) -> str:
    """Speed, waiting time, and the use of the cache, in one line."""
    from bifolio.measure.statistics import show_seconds

    metrics, num_output = request.metrics, len(request.sequences[0].output_token_ids)
    num_prompt, stats = len(request.prompt_token_ids), llm.engine.stats()
    held = num_prompt + num_output
    size = stats.num_blocks * llm.engine.config.cache.block_size
    speed = f"{(num_output - 1) / metrics.decode_time:.1f} tok/s" if metrics.decode_time and num_output > 1 else "-"
    return (
        f"{num_output} tokens, {speed}, first after {show_seconds(metrics.time_to_first_token)} · prompt "
        f"{num_prompt} tokens, {metrics.num_cached_tokens} from the cache · context {held} of "
        f"{llm.engine.config.max_model_len}, cache {100 * held / max(size, 1):.1f} % used"
    )
