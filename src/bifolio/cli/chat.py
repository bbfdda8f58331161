"""`bifolio chat`: a conversation in the terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from bifolio.cli import commands, options
from bifolio.config import NUMERICS

if TYPE_CHECKING:
    from bifolio.api.llm import LLM
    from bifolio.sampling_params import SamplingParams
    from bifolio.sequence import Request

HELP = """Chat with a model.

Answers stream as they are generated. Commands: /help, /reset, /system, /save, /quit. Earlier turns stay in the prefix
cache, so a long conversation does not get slower to continue. With piped input, every line is a turn and only the
answers go to standard output."""
EPILOG = """Examples:

  bifolio chat -m ./SmolLM2-135M-Instruct.gguf

  bifolio chat -m ./model --system "You answer in one sentence." --temperature 0.7

  echo "What is the capital of France?" | bifolio chat -m ./model --temperature 0"""
COMMANDS = {
    "/help": "show this list",
    "/reset": "forget the conversation; the system prompt stays",
    "/system TEXT": "set the system prompt and start over; without TEXT: show it",
    "/save FILE": "write the conversation as JSON",
    "/quit": "leave (also Ctrl-D)",
}


def register(app: commands.App) -> None:
    app.command("chat", help=HELP, epilog=EPILOG)(chat)


def chat(
    model: options.Model = None,
    system: Annotated[str | None, commands.option("--system", "-s", help="The system prompt.")] = None,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    memory: options.Memory = None,
    max_model_len: options.MaxModelLen = None,
    block_size: options.AnyBlockSize = None,
    chunk_size: options.AnyChunkSize = None,
    kv_dtype: options.KvDtype = NUMERICS.kv_dtype,
    activations: options.Activations = NUMERICS.activations,
    threads: options.Threads = NUMERICS.threads,
    device: options.Device = NUMERICS.device,
    deterministic: options.Deterministic = NUMERICS.deterministic,
    gpu_memory_utilization: options.GpuMemoryUtilization = 0.9,
    verbose: options.Verbose = False,
) -> None:
    from bifolio.api.llm import LLM

    llm = LLM(
        model,
        dtype=kv_dtype,
        memory=memory,
        max_model_len=max_model_len,
        max_num_seqs=1,
        block_size=block_size,
        chunk_size=chunk_size,
        activations=activations,
        threads=threads,
        device=device,
        deterministic=deterministic or None,
        gpu_memory_utilization=gpu_memory_utilization,
        verbose=verbose,
    )
    given = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
        "stop": stop,
    }
    explicit = {name: value for name, value in given.items() if value is not None}
    params = llm.default_params(**{"max_tokens": None, **explicit})
    terminal = Terminal(sys.stdin.isatty() and sys.stdout.isatty())
    conversation = Conversation(llm, params, system)
    conversation.check()
    terminal.welcome(f"{llm.model.path.name} on {llm.engine.runner.kernels.name} kernels")
    for line in terminal.lines():
        if line.startswith("/"):
            if not obey(line, conversation, terminal):
                break
        else:
            answer(line, conversation, terminal)


def obey(line: str, conversation: Conversation, terminal: Terminal) -> bool:
    """Run a command; False to leave."""
    command, _, argument = line.partition(" ")
    argument = argument.strip()
    if command in ("/quit", "/exit"):
        return False
    if command == "/reset":
        conversation.reset(conversation.system)
        terminal.note("started over")
    elif command == "/system" and argument:
        conversation.reset(argument)
        terminal.note("system prompt set, started over")
    elif command == "/system":
        terminal.note(conversation.system or "no system prompt of yours; the model's template may add its own")
    elif command == "/save":
        terminal.note(conversation.save(argument))
    else:
        if command != "/help":
            terminal.note(f"unknown command {command}")
        for name, text in COMMANDS.items():
            terminal.note(f"{name:<14} {text}")
    return True


def answer(line: str, conversation: Conversation, terminal: Terminal) -> None:
    """Run one turn. Ctrl-C ends the answer and keeps its text; a refused turn leaves the conversation unchanged."""
    from bifolio.errors import RequestError

    try:
        request = conversation.turn(line, terminal.write)
    except RequestError as error:
        terminal.note(f"{error}. /reset starts over.")
        return
    terminal.write("\n")
    terminal.note(summary(request, conversation.llm))


class Conversation:
    """The messages so far; their keys and values stay in the engine's prefix cache."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None = None) -> None:
        self.llm = llm
        self.params = params
        self.system = system
        self.messages: list[dict[str, str]] = []
        self.reset(system)

    def reset(self, system: str | None) -> None:
        self.system = system
        self.messages = [{"role": "system", "content": system}] if system else []

    def check(self) -> None:
        """Refuse a model without a chat template or tokenizer before the first turn."""
        from bifolio.errors import ChatTemplateError

        if self.llm.model.chat_template is None:
            raise ChatTemplateError(
                f"{self.llm.model.path.name} has no chat template: `bifolio generate` continues text with it; "
                "`bifolio pull smollm2` fetches a model that chats (then: bifolio chat -m smollm2)"
            )
        self.llm.chat_tokens([*self.messages, {"role": "user", "content": "Hello"}])

    def turn(self, text: str, write: Callable[[str], None]) -> Request:
        """Say `text`, write the answer as it comes, and keep both."""
        messages = [*self.messages, {"role": "user", "content": text}]
        prompt = {"prompt_token_ids": self.llm.chat_tokens(messages)}
        pieces: list[str] = []
        request: Any = None
        stream = self.llm.stream(prompt, self.params)
        try:
            for result in stream:
                request = result.sequence.request if result.sequence is not None else request
                pieces.append(result.text)
                write(result.text)
        except KeyboardInterrupt:
            write(" [stopped]")
        finally:
            stream.close()  # type: ignore[attr-defined]
        if request is None:
            raise KeyboardInterrupt
        self.messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]
        return request  # type: ignore[no-any-return]

    def save(self, path: str) -> str:
        if not path:
            return "say where: /save conversation.json"
        try:
            Path(path).expanduser().write_text(
                json.dumps({"messages": self.messages}, ensure_ascii=False, indent=2) + "\n", encoding="utf-8"
            )
        except OSError as error:
            return f"could not write {path}: {error.strerror}"
        return f"{len(self.messages)} messages written to {path}"


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


class Terminal:
    """Where turns come from and answers go: a person, or a pipe."""

    def __init__(self, interactive: bool) -> None:
        self.interactive = interactive
        from rich.console import Console

        self._notes = Console(stderr=True, highlight=False)

    def welcome(self, text: str) -> None:
        if self.interactive:
            self.note(f"{text}. /help lists the commands.")

    def note(self, text: str) -> None:
        """Something about the conversation: dim, on standard error."""
        self._notes.print(text, style="dim", markup=False)

    def write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    def lines(self) -> Iterator[str]:
        """Turns, without blank ones, until the input ends."""
        read = self._ask if self.interactive else sys.stdin.readline
        if self.interactive:
            enable_history()
        while (line := read()) != "":
            if line.strip():
                yield line.strip()

    def _ask(self) -> str:
        """One line with editing and history; "" at Ctrl-D; Ctrl-C clears the line."""
        while True:
            try:
                return input("\n> ") + "\n"
            except EOFError:
                self.write("\n")
                return ""
            except KeyboardInterrupt:
                self.write("\n")


def enable_history() -> None:
    """Arrow keys and earlier lines, where the platform has readline."""
    try:
        import readline
    except ImportError:
        return
    readline.set_history_length(1000)
    readline.parse_and_bind("tab: self-insert")
