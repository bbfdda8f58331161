"""Running the command in this process: what it prints, what it reads, and how it ends."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass

import pytest

from bifolio.cli.commands import App


class _Both(io.StringIO):
    """A stream that is also kept in the order of all that was printed."""

    def __init__(self, everything: io.StringIO) -> None:
        super().__init__()
        self._everything = everything

    def write(self, text: str) -> int:
        self._everything.write(text)
        return super().write(text)


@dataclass(frozen=True, slots=True)
class Result:
    exit_code: int
    stdout: str
    stderr: str
    output: str  # both
    exception: BaseException | None = None


class CliRunner:
    def invoke(
        self, app: App, arguments: Sequence[str], input: str | None = None, catch_exceptions: bool = True
    ) -> Result:
        everything = io.StringIO()
        out, err = _Both(everything), _Both(everything)
        code, raised = 0, None
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
            patch.setattr(sys, "stdin", io.StringIO(input or ""))
            try:
                app(list(arguments))
            except SystemExit as exit:
                code = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
            except Exception as error:
                if not catch_exceptions:
                    raise
                code, raised = 1, error
        return Result(code, out.getvalue(), err.getvalue(), everything.getvalue(), raised)
