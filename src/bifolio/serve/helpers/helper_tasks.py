"""The tasks of a helper process: chat templates of untrusted model files and grammars of clients."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
from pathlib import Path

from bifolio.api.messages import FrameReader, frame
from bifolio.errors import BifolioError, ChatTemplateError, RequestError
from bifolio.images import TEXT_ONLY
from bifolio.model.loaded import TextModel
from bifolio.model.loader import open_text_model
from bifolio.model.vision.decoding import decoded
from bifolio.serve.helpers import helper_messages as h
from bifolio.text.chat_template import render_chat
from bifolio.text.tokenizer import is_library_error

READ_BYTES = 1 << 18


class TaskRunner:
    """The model. It is read once, by the process that the processes of the tasks are forked from."""

    def __init__(self, prepare: h.Prepare) -> None:
        self._model: TextModel = open_text_model(prepare.model, prepare.mmproj)
        self._memory_bytes = prepare.memory_bytes
        if prepare.reads_tokenizer:
            from bifolio.sampling.grammar import prepare_compiler

            with contextlib.suppress(BifolioError):  # raised again by every task
                prepare_compiler(self._model)

    def serve(self, connection: socket.socket, nice: int) -> None:
        """In a forked process: answer one task after the other, until the other end is closed."""
        os.nice(nice)
        limit = _address_space() + self._memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        reader = FrameReader(h.task_decoder)
        while data := connection.recv(READ_BYTES):
            for message in reader.feed(data):
                signal.setitimer(signal.ITIMER_PROF, message.cpu_seconds)  # SIGPROF ends the process
                result = self._run(message.task)
                signal.setitimer(signal.ITIMER_PROF, 0.0)
                connection.sendall(frame(result))

    def _run(self, task: h.Task) -> h.Result:
        """The result of one task; a breach of a limit ends the process instead."""
        try:
            if isinstance(task, h.View):
                return self._view(task)
            return h.Done(self._render(task)) if isinstance(task, h.Render) else self._check(task)
        except BifolioError as error:
            return h.Failed(type(error).__name__, str(error))
        except BaseException as error:
            if not is_library_error(error):
                raise
            return h.Failed(type(error).__name__, "the helper process failed")

    def _render(self, task: h.Render) -> str:
        try:
            return render_chat(
                self._model.chat_template,
                task.messages,
                special_tokens=self._model.special_tokens,
                add_generation_prompt=task.add_generation_prompt,
                tools=task.tools,
                **task.variables,
            )
        except MemoryError as error:
            raise ChatTemplateError("the chat template takes too much memory") from error

    def _view(self, task: h.View) -> h.Viewed:
        if self._model.vision is None:
            raise RequestError(TEXT_ONLY)
        try:
            picture = self._model.vision.read(decoded(task.data))
        except MemoryError as error:
            raise RequestError("the image takes too much memory: send a smaller one") from error
        return h.Viewed(picture.text, [(*tile.shape[:2], tile.tobytes()) for tile in picture.tiles])

    def _check(self, task: h.Check) -> h.Done:
        from bifolio.sampling.grammar import Grammar, probe_grammar

        probe_grammar(Grammar(task.kind, task.text), self._model)  # type: ignore[arg-type]
        return h.Done()


def _address_space() -> int:
    """Bytes of address space of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    return pages * resource.getpagesize()
