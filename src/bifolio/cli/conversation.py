"""The conversation behind `bifolio chat`: messages, branches, and the policy for a full context."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bifolio.engine.memory import show_bytes
from bifolio.errors import BifolioError, ConfigError, RequestError, SnapshotError
from bifolio.text.loops import LoopWatch

if TYPE_CHECKING:
    from bifolio.api.llm import LLM
    from bifolio.sampling_params import SamplingParams
    from bifolio.sequence import Request

POLICIES = ("drop", "summarise", "stop")
ANSWER_TOKENS = 4096  # the longest answer, unless max_tokens says otherwise
ROOM = 256  # tokens of context that a turn leaves for its answer, at most a quarter of the context
SUMMARY_TOKENS = 160
SUMMARY_REQUEST = "Summarise our conversation so far in at most 80 words."
SUMMARY_TITLE = "Summary of the earlier conversation:"
SESSION_SUFFIX = ".session"  # of files with blocks
Messages = list[dict[str, Any]]


def checked_policy(name: str) -> str:
    """A policy by its name; the American spelling is accepted."""
    name = name.replace("summarize", "summarise")
    if name not in POLICIES:
        raise ConfigError(f"the context policy is one of {', '.join(POLICIES)}, not {name!r}")
    return name


@dataclass(frozen=True, slots=True)
class Context:
    """The messages that the model reads at a turn."""

    messages: Messages
    num_dropped: int  # messages of the conversation before them that left the context
    summary: str | None


@dataclass(frozen=True, slots=True)
class Branch:
    """The state of a conversation that was left for another branch."""

    system: str | None
    messages: Messages
    num_dropped: int
    summary: str | None


class Conversation:
    """The messages so far; their keys and values stay in the engine's prefix cache."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None = None, policy: str = "drop") -> None:
        self.llm = llm
        self.params = params
        self.system = system
        self.policy = checked_policy(policy)
        self.stop_loops = True  # end an answer that repeats itself (`text.loops`)
        self.messages: Messages = []  # all of them, the system prompt included
        self.images: list[dict[str, Any]] = []  # parts of the next message
        self.branch_name = "main"
        self.branches: dict[str, Branch] = {}  # left ones, by name
        self.notes: list[str] = []  # remarks on the last turn for the person
        self._num_dropped = 0  # oldest messages, after the system prompt, that left the context
        self._summary: str | None = None
        self.reset(system)

    def reset(self, system: str | None) -> None:
        """Start over."""
        self.system = system
        self.messages = [{"role": "system", "content": system}] if system else []
        self._num_dropped, self._summary = 0, None

    def check(self) -> None:
        """Refuse a model without a chat template or tokenizer before the first turn."""
        from bifolio.errors import ChatTemplateError

        if self.llm.model.chat_template is None:
            raise ChatTemplateError(
                f"{self.llm.model.path.name} has no chat template: `bifolio generate` continues text with it; "
                "`bifolio pull smollm2` fetches a model that chats (then: bifolio chat -m smollm2)"
            )
        self.llm.chat_tokens([*self.messages, {"role": "user", "content": "Hello"}])

    # -- turns -------------------------------------------------------------------------------------------------------
    def show(self, path: str) -> str:
        """Keep the image of a file for the next message."""
        from bifolio.api.images import image_of_file, required_vision
        from bifolio.cli.dropped_files import path_of
        from bifolio.text.data_urls import url_of

        if not path:
            count, self.images = len(self.images), []
            return f"{count} images forgotten"
        file = path_of(path)
        try:
            required_vision(self.llm.model)
            image = image_of_file(file)
        except BifolioError as error:
            return str(error)
        self.images.append({"type": "image_url", "image_url": {"url": url_of(file.read_bytes())}})
        return f"{file.name}, {image.width} x {image.height} pixels: it goes with the next message"

    def turn(self, text: str | list[Any], write: Callable[[str], None]) -> Request:
        """Say `text` behind the images that wait, write the answer as it comes, and keep both.

        Ctrl-C ends the answer and keeps its text.
        """
        self.notes = []
        content = [*self.images, {"type": "text", "text": text}] if self.images else text
        messages = [*self.messages, {"role": "user", "content": content}]
        context = self.fitted(messages)
        prompt = self.llm.chat_prompt(context.messages)
        pieces: list[str] = []
        stream = self.llm.stream(prompt, self.params)
        watch = LoopWatch()
        try:
            for result in stream:
                pieces.append(result.text)
                write(result.text)
                if result.token is not None and watch.add(result.token) and self.stop_loops and not result.finished:
                    self.notes.append("[the answer repeats itself and was stopped: /set stop-loops off lets it go on]")
                    break
        except KeyboardInterrupt:
            write(" [stopped]")
        finally:
            stream.close()
        if pieces:  # else Ctrl-C came before the first token, and nothing was said
            self.messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]
            self.images = []
            self._note_context(context)
        (request,) = stream.requests
        self._note_cut(request)
        return request

    def regenerate(self, write: Callable[[str], None]) -> Request:
        """Answer the last message again; a seed that was set is changed, or the answer would be the same."""
        last = next((at for at in range(len(self.messages) - 1, -1, -1) if self.messages[at]["role"] == "user"), None)
        if last is None:
            raise RequestError("there is no answer yet: say something first")
        before, params, text = self.messages, self.params, self.messages[last]["content"]
        self.messages = self.messages[:last]
        if self.params.seed is not None:
            self.params = replace(self.params, seed=self.params.seed + len(before))
        try:
            return self.turn(text, write)
        except BaseException:
            self.messages = before
            raise
        finally:
            self.params = params

    # -- the context -------------------------------------------------------------------------------------------------
    def fitted(self, messages: Messages) -> Context:
        """The part of the messages that the context holds, by the policy; the last message is always in it."""
        context = self._context(messages, self._num_dropped, self._summary)
        if self.policy == "stop" or self._fits(context.messages):
            return context
        dropped = self._dropped(messages, self._summary)
        if self.policy == "summarise" and dropped.num_dropped > self._num_dropped:
            return self._summarised(messages, dropped)
        return dropped

    def _dropped(self, messages: Messages, summary: str | None) -> Context:
        """The context without the oldest turns: as few as need to go, and never the last message."""
        context = self._context(messages, self._num_dropped, summary)
        turns = [at - self._num_system for at, message in enumerate(messages) if message["role"] == "user"]
        for num_dropped in turns:
            if self._fits(context.messages):
                break
            if num_dropped > self._num_dropped:
                context = self._context(messages, num_dropped, summary)
        return context

    @property
    def _num_system(self) -> int:
        return int(self.system is not None and bool(self.messages) and self.messages[0]["role"] == "system")

    def _context(self, messages: Messages, num_dropped: int, summary: str | None) -> Context:
        head, rest = messages[: self._num_system], messages[self._num_system + num_dropped :]
        if summary is not None:
            text = "\n\n".join([*(message["content"] for message in head), f"{SUMMARY_TITLE} {summary}"])
            head = [{"role": "system", "content": text}]
        return Context([*head, *rest], num_dropped, summary)

    def _fits(self, messages: Messages, room: int = ROOM) -> bool:
        length = self.llm.engine.config.max_model_len
        room = min(room if self.params.max_tokens is None else min(room, self.params.max_tokens), length // 4)
        return len(self.llm.chat_tokens(messages)) + max(room, 1) <= length

    def _summarised(self, messages: Messages, dropped: Context) -> Context:
        """The context with a summary by the model in the place of the dropped turns."""
        old = messages[self._num_system + self._num_dropped : self._num_system + dropped.num_dropped]
        request = {"role": "user", "content": SUMMARY_REQUEST}
        while old and not self._fits([*self._context(old, 0, self._summary).messages, request], SUMMARY_TOKENS):
            old = old[1:]
        if not old:
            return dropped
        try:
            tokens = self.llm.chat_tokens([*self._context(old, 0, self._summary).messages, request])
            length = min(SUMMARY_TOKENS, self.llm.engine.config.max_model_len // 4)
            params = replace(self.params, max_tokens=length, grammar=None)
            summary = self.llm.generate({"prompt_token_ids": tokens}, params)[0].outputs[0].text.strip()
            return self._dropped(messages, summary or None)
        except BifolioError:  # a template that takes no system prompt, or no two messages of one role
            return dropped

    def _note_context(self, context: Context) -> None:
        count = context.num_dropped - self._num_dropped
        if count:
            did = "were summarised" if context.summary != self._summary else "left the context"
            self.notes.append(f"the context is full: the {count} oldest messages {did} (--context-policy)")
        self._num_dropped, self._summary = context.num_dropped, context.summary

    def _note_cut(self, request: Request) -> None:
        (sequence,) = request.sequences
        reason = sequence.finish_reason
        if reason is not None and reason.value == "length":
            limit = "max_tokens" if len(sequence.output_token_ids) == self.params.max_tokens else "the context is full"
            self.notes.append(f"[the answer was cut after {len(sequence.output_token_ids)} tokens: {limit}]")

    # -- files and branches ------------------------------------------------------------------------------------------
    def save(self, path: str, with_blocks: bool = False) -> str:
        """Write the messages as JSON; to a name that ends in `.session`, or if asked for, with their blocks."""
        if not path:
            return "say where: /save conversation.json"
        if with_blocks or path.endswith(SESSION_SUFFIX):
            return self._save_session(path)
        try:
            Path(path).expanduser().write_text(
                json.dumps({"messages": self.messages}, ensure_ascii=False, indent=2) + "\n", encoding="utf-8"
            )
        except OSError as error:
            return f"could not write {path}: {error.strerror}"
        return f"{len(self.messages)} messages written to {path}"

    def load(self, path: str) -> str:
        from bifolio.engine.tiers.snapshots import is_snapshot
        from bifolio.text.chat_template import check_messages

        if not path:
            return "say which: /load conversation.json"
        if is_snapshot(Path(path).expanduser()):
            try:
                return self.load_session(path)
            except BifolioError as error:
                return str(error)
        try:
            record: Any = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
            messages = record["messages"] if isinstance(record, dict) else record
            check_messages(messages)
        except OSError as error:
            return f"could not read {path}: {error.strerror}"
        except (ValueError, KeyError, TypeError) as error:
            return f"{path} is no saved conversation: {error}"
        system = messages[0]["content"] if messages[0]["role"] == "system" else None
        self.reset(system)
        self.messages = [dict(message) for message in messages]
        return f"{len(messages)} messages read from {path}"

    def _save_session(self, path: str) -> str:
        if not any(message["role"] == "assistant" for message in self.messages):
            return "there is no answer to save yet"
        context = self._context(self.messages, self._num_dropped, self._summary)
        tokens = self.llm.chat_prompt(context.messages, add_generation_prompt=False)
        notes = {"messages": self.messages, "num_dropped": self._num_dropped, "summary": self._summary}
        try:
            size = self.llm.save(tokens, path, notes=notes)
        except BifolioError as error:
            return str(error)
        return f"{len(self.messages)} messages written to {path}, {show_bytes(size)} with their part of the cache"

    def load_session(self, path: str) -> str:
        """Continue a saved conversation; one of another model or arithmetic is computed again at the next turn."""
        from bifolio.engine.tiers.snapshots import read_snapshot, restore
        from bifolio.text.chat_template import check_messages

        snapshot = read_snapshot(Path(path).expanduser())
        messages: Any = snapshot.notes.get("messages")
        num_dropped: Any = snapshot.notes.get("num_dropped")
        summary: Any = snapshot.notes.get("summary")
        is_whole = isinstance(messages, list) and type(num_dropped) is int and isinstance(summary, str | None)
        if not is_whole or not messages or not 0 <= num_dropped <= len(messages):
            raise SnapshotError(f"{path} is a snapshot without a conversation: load it with LLM.load")
        check_messages(messages)
        try:
            count = self.llm.with_engine(lambda: restore(self.llm.engine, snapshot))
            note = f"{count} of {len(snapshot.token_ids)} tokens from the file"
        except SnapshotError as error:
            note = f"computed again, since {error.args[0].partition(':')[0]}"
        self.reset(messages[0]["content"] if messages[0]["role"] == "system" else None)
        self.messages = [dict(message) for message in messages]
        self._num_dropped, self._summary = num_dropped, summary
        return f"{len(messages)} messages read from {path}, {note}"

    def branch(self, name: str) -> str:
        """Switch to a branch; a new name begins a copy of this conversation. Their common beginning shares blocks."""
        if not name:
            others = sorted(other for other in self.branches if other != self.branch_name)
            return f"this is {self.branch_name!r}; others: {', '.join(others) or 'none'}"
        if name == self.branch_name:
            return f"this is {name!r} already"
        self.branches[self.branch_name] = Branch(self.system, self.messages, self._num_dropped, self._summary)
        kept = self.branches.get(name)
        self.branch_name = name
        if kept is None:
            return f"{name!r} begins here"
        self.system, self.messages = kept.system, kept.messages
        self._num_dropped, self._summary = kept.num_dropped, kept.summary
        return f"back to {name!r}, {len(self.messages)} messages"
