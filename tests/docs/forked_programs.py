"""Runs Python programs in forks of one process that has imported torch and bifolio: seconds less for each of them.

    python forked_programs.py serve SOCKET               forks a program for each request
    python forked_programs.py run SOCKET ARGUMENTS...    `python ARGUMENTS...` in a fork, on the streams of this process

A program gets the arguments, the folder and the environment of the process that asks for it, and ends with it. Modules
that read the environment when they are imported must not be among those that the forks share.
"""

from __future__ import annotations

import gc
import io
import json
import os
import runpy
import select
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any

MOST_BYTES = 1 << 20


def share_imports() -> None:
    """Import the modules that take long, and find the fonts of this machine."""
    import matplotlib.pyplot

    from bifolio.cli.main import build_app

    for name in ("torch._dynamo", "bifolio.api.llm"):  # the first step of an optimizer imports the first one
        import_module(name)
    build_app()
    matplotlib.pyplot.figure()
    matplotlib.pyplot.close()
    gc.collect()
    gc.freeze()


def wait_for_request(path: str) -> dict[str, Any]:
    """Returns in a fork, once for each request, with its streams; the process that serves never returns."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen(8)
        print("ready", flush=True)
        while True:
            connection, _ = listener.accept()
            if os.fork():
                connection.close()
                reap()
                continue
            listener.close()
            content, streams, _, _ = socket.recv_fds(connection, MOST_BYTES, 3)
            program = os.fork()
            if program:
                watch(program, connection)
            connection.close()
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
                os.close(stream)
            request: dict[str, Any] = json.loads(content)
            return request


def reap() -> None:
    """Take note of forks that have ended."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def watch(program: int, connection: socket.socket) -> None:
    """Send how a program ends; kill it if the process that asked for it is gone."""
    end = os.pidfd_open(program)
    ready, _, _ = select.select([end, connection], [], [])
    if end not in ready:
        os.kill(program, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
    if end in ready:
        connection.sendall(str(code if code >= 0 else 128 - code).encode())
    os._exit(0)


def run(request: dict[str, Any]) -> None:
    """Be `python ARGUMENTS...` in the folder and the environment of the request."""
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), encoding="utf-8")
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.BufferedWriter(io.FileIO(number, "w", closefd=False)), "utf-8", line_buffering=number == 2)
        for number in (1, 2)
    )
    first, *rest = request["arguments"]
    if first == "-m":
        sys.path[0], sys.argv = "", rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0], sys.argv = os.path.dirname(os.path.abspath(first)), request["arguments"]
        runpy.run_path(first, run_name="__main__")


def ask(path: str, arguments: list[str]) -> int:
    """How the program ends; other uses of python than a file and `-m` are a process of their own."""
    if arguments[:1] != ["-m"] and (not arguments or arguments[0].startswith("-")):
        os.execv(sys.executable, [sys.executable, *arguments])
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(path)
        request = {"arguments": arguments, "folder": os.getcwd(), "environment": dict(os.environ)}
        socket.send_fds(connection, [json.dumps(request).encode()], [0, 1, 2])
        return int(connection.recv(16) or b"1")


@contextmanager
def serving() -> Iterator[str]:
    """The socket of a process that serves."""
    import subprocess
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "MPLCONFIGDIR": folder, "MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1"}
        path = os.path.join(folder, "socket")
        command = [sys.executable, __file__, "serve", path]
        with subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as server:
            try:
                if server.stdout is None or server.stdout.readline() != b"ready\n":
                    raise RuntimeError("the process that forks programs did not start")
                yield path
            finally:
                server.terminate()


if __name__ == "__main__":
    if sys.argv[1] == "run":
        sys.exit(ask(sys.argv[2], sys.argv[3:]))
    share_imports()
    run(wait_for_request(sys.argv[2]))
