"""Runs a page from its first block to its last, as a reader follows a tutorial."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from doc_blocks import Block
from doc_runner import DocumentedCommandError, Runner, check_success
from stand_ins import provide_named

# One interpreter for the Python blocks of a page: reads the names of files, runs each in the same namespace.
INTERPRETER = """
import io, json, sys, traceback
from contextlib import redirect_stdout
namespace = {"__name__": "__main__"}
for line in sys.stdin:
    source, written, failure = json.loads(line), io.StringIO(), None
    try:
        with redirect_stdout(written):
            exec(compile(open(source, encoding="utf-8").read(), source, "exec"), namespace)
    except BaseException:
        failure = traceback.format_exc()
    sys.stdout.write(json.dumps([written.getvalue(), failure]) + "\\n")
    sys.stdout.flush()
"""


class PageWalk(Runner):
    """The blocks of one page, in one folder; servers run until the walk ends or another one takes their place."""

    def __init__(self, folder: Path, python: str = sys.executable, models: Path | None = None) -> None:
        super().__init__(folder, None, python, models)
        self._servers = ExitStack()
        self._interpreter: subprocess.Popen[str] | None = None

    def __enter__(self) -> PageWalk:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._interpreter is not None:
            self._interpreter.kill()
            self._interpreter.communicate()
        self._servers.__exit__(kind, error, trace)

    def walk(self, blocks: list[Block]) -> None:
        for block in blocks:
            if block.marker.never is not None or block.kind in ("none", "unknown"):
                continue
            output = self._one(block)
            if output is not None:
                self.compare(block, output)

    def _one(self, block: Block) -> str | None:
        if block.kind == "session":
            self._converse(block)
            return None
        if self.only_checked(block):
            self.check(block)
            return None
        return self._interpret(block) if block.kind == "python" else self.run_shell(block, self.commands(block))

    def run_server(self, command: str) -> None:
        """Start a server that runs until the page ends, or until the page starts another."""
        self._servers.close()
        self._servers.enter_context(self.server(command))

    def _interpret(self, block: Block) -> str:
        provide_named(block.text, self.folder)
        if self._interpreter is None:
            self._interpreter = subprocess.Popen(
                [self.python, "-c", INTERPRETER], cwd=self.folder, env=self.environment,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
        source = self.folder.parent / f"block-{block.line}.py"
        source.write_text(self._moved(block.text), encoding="utf-8")
        assert self._interpreter.stdin is not None
        assert self._interpreter.stdout is not None
        self._interpreter.stdin.write(json.dumps(str(source)) + "\n")
        self._interpreter.stdin.flush()
        answer = self._interpreter.stdout.readline()
        output, failure = json.loads(answer) if answer else ("", "the interpreter ended")
        if failure is not None:
            raise DocumentedCommandError(f"{block.name}: this fails:\n{block.text}\n{output}{failure}")
        return str(output)

    def _converse(self, block: Block) -> None:
        """Type the lines of a conversation, and find the answers that the page shows in their order."""
        command = block.session or ""
        self.provide_models(command)
        lines = block.text.splitlines()
        typed = [line.removeprefix("> ") for line in lines if line.startswith("> ")]
        done = self._bash(command, "\n".join([*typed, ""]))
        check_success(command, done)
        answers = [re.escape(line.rstrip()) for line in lines if line.strip() and not line.startswith("> ")]
        pattern = r".*".join(answers).replace(re.escape("..."), ".*")
        output = done.stdout + done.stderr
        if self.real_models and not re.search(pattern, output, re.DOTALL):
            raise DocumentedCommandError(f"{block.name} shows other answers than\n{output}")
