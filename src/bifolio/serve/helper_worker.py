"""A helper process: `python -m bifolio.serve.helper_worker FD`, started by `serve.helper`.

It runs tasks whose cost a stranger decides: chat templates of untrusted model files and grammars of clients. Each task
has a limit on CPU seconds and on address space. The system kills the process at the limit; the front end starts a new
one.
"""

from __future__ import annotations

import contextlib
import resource
import signal
import socket
import sys
from pathlib import Path

from bifolio.api.messages import FrameReader, frame
from bifolio.errors import BifolioError, ChatTemplateError
from bifolio.model.loaded import TextModel
from bifolio.model.loader import open_text_model
from bifolio.serve import helper_messages as h
from bifolio.text.chat_template import render_chat
from bifolio.text.tokenizer import is_library_error

READ_BYTES = 1 << 18


class Worker:
    """The model, and the limits of each task."""

    def __init__(self, prepare: h.Prepare) -> None:
        self._model: TextModel = open_text_model(prepare.model)
        self._cpu_seconds = prepare.cpu_seconds
        if prepare.reads_tokenizer:
            from bifolio.sampling.grammar import prepare_compiler

            with contextlib.suppress(BifolioError):  # raised again by every task
                prepare_compiler(self._model)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        limit = _address_space() + prepare.memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    def run(self, task: h.Task) -> h.Done | h.Failed:
        """The outcome of one task; a breach of a limit ends the process instead."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        limit = int(used.ru_utime + used.ru_stime) + 1 + self._cpu_seconds
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
        try:
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

    def _check(self, task: h.Check) -> h.Done:
        from bifolio.sampling.grammar import Grammar, probe_grammar

        probe_grammar(Grammar(task.kind, task.text), self._model)  # type: ignore[arg-type]
        return h.Done()


def _address_space() -> int:
    """Bytes of address space of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    return pages * resource.getpagesize()


def serve(connection: socket.socket) -> None:
    """Answer one task after the other, until the other end is closed."""
    reader = FrameReader(h.to_helper_decoder)
    worker: Worker | None = None
    while data := connection.recv(READ_BYTES):
        for message in reader.feed(data):
            if isinstance(message, h.Prepare):
                try:
                    worker = Worker(message)
                except BifolioError as error:
                    connection.sendall(frame(h.Failed(type(error).__name__, str(error))))
                    return
                connection.sendall(frame(h.Done()))
            elif worker is not None:
                connection.sendall(frame(worker.run(message)))


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the front end decides
    with contextlib.suppress(OSError):  # the front end is gone
        serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
