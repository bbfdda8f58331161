"""Worker processes, as the runner sees them."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.columns import Column
from benchmarks.worker import MARK

ROOT = Path(__file__).resolve().parents[1]
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT", "XDG_CACHE_HOME", "CUDA_CACHE_PATH")
CODE = "import sys; sys.path.insert(0, sys.argv[1]); from benchmarks.worker import main; main()"


@dataclass(frozen=True)
class Setting:
    """The conditions of all processes of a run."""

    device: str = "cpu"
    threads: int | None = None
    clock: str = "wall"
    tiny: bool = False
    peer_env: Path | None = None  # a shell file: the environment of vLLM
    timeout: float = 1800.0  # seconds that one figure may take
    source: Path | None = None  # a checkout whose `src` holds the bifolio to measure; None: the one that is installed
    caches: dict[str, str] = field(default_factory=dict)  # folders of compiled kernels


class Worker:
    """A process with an engine; `failed` says why it has ended or never began."""

    def __init__(self, column: Column, model: Path | str, setting: Setting) -> None:
        self.column, self.failed, self.unsupported = column, "", ""
        self._timeout = setting.timeout
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            command(column, setting),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment(column, setting),
            start_new_session=True,
        )
        spec = {"column": column.name, "model": str(model), "device": setting.device, "threads": setting.threads,
                "clock": setting.clock, "tiny": setting.tiny, "spawned": time.time()}  # fmt: skip
        self.opened = self.ask(spec)
        if "about" not in self.opened:
            self.failed = self.failed or self.opened.get("error", "") or self.opened.get("unsupported", "")
            self.unsupported = self.opened.get("unsupported", "")

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def measure(self, workload: str, seed: int) -> dict[str, Any]:
        """{"value", "details"}, {"unsupported"} or {"error"}."""
        if self.failed:
            return {"unsupported": self.unsupported} if self.unsupported else {"error": self.failed}
        return self.ask({"workload": workload, "seed": seed})

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("the process has no pipes")
        timer = threading.Timer(self._timeout, self._kill)
        timer.start()
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
            for line in self._process.stdout:
                if line.startswith(MARK):
                    found: dict[str, Any] = json.loads(line[len(MARK) :])
                    return found
        except BrokenPipeError:
            pass
        finally:
            timer.cancel()
        self.failed = f"the process ended: {self._last_error()}"
        return {"error": self.failed}

    def _last_error(self) -> str:
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors if line.strip()]
        return next((line for line in reversed(lines) if "Error" in line), lines[-1] if lines else "no message")[:300]

    def _kill(self) -> None:
        """All processes of the engine: those that it started hold memory of the device, too."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(90)
        self._kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()


def command(column: Column, setting: Setting) -> list[str]:
    if column.engine == "vllm" and setting.peer_env is not None:
        inner = shlex.join(["python3", "-c", CODE, str(ROOT)])
        return ["bash", "-c", f". {shlex.quote(str(setting.peer_env))} && exec {inner}"]
    return [sys.executable, "-c", CODE, str(ROOT)]


def environment(column: Column, setting: Setting) -> dict[str, str]:
    """Variables of a process; those of the column come last."""
    variables = {"VLLM_USE_FLASHINFER_SAMPLER": "0", **os.environ}  # its default needs a package of its own
    if setting.source is not None:
        paths = [str(setting.source / "src"), os.environ.get("PYTHONPATH", "")]
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return {**variables, **setting.caches, **column.environment}


def cold_caches(folder: Path) -> dict[str, str]:
    """Empty folders for everything that engines compile and keep."""
    return {name: str(folder / name.lower()) for name in CACHES}
