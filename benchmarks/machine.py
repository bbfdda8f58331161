"""The machine, the versions and the commit of a run."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("numpy", "torch", "triton", "gguf", "tokenizers")
LOOPS = 2_000_000


def describe(device: str, threads: int | None) -> dict[str, Any]:
    """Names and sizes; `host_loops` is millions of iterations of an empty Python loop per second."""
    found = {
        "cpu": cpu_name(),
        "cores": os.cpu_count() or 1,
        "threads": threads,
        "isa": isa(),
        "memory_gb": round(memory_bytes() / 1e9, 1),
        "host_loops": round(host_speed(), 1),
        "load": [round(value, 1) for value in os.getloadavg()],
    }
    if device.startswith("cuda"):
        import torch

        found["gpu"] = torch.cuda.get_device_name(device)
    return found


def cpu_name() -> str:
    try:
        done = subprocess.run(["lscpu"], capture_output=True, text=True, check=True, env={**os.environ, "LC_ALL": "C"})
        lines = dict(line.split(":", 1) for line in done.stdout.splitlines() if ":" in line)
        return f"{lines['Model name'].strip()} ({platform.machine()})"
    except (OSError, subprocess.CalledProcessError, KeyError):
        return platform.processor() or platform.machine()


def isa() -> str:
    from bifolio.errors import MissingDependencyError
    from bifolio.kernels import cpu

    try:
        return cpu.isa()
    except MissingDependencyError:
        return "native kernels are not built"


def memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def host_speed() -> float:
    start = time.perf_counter()
    for _ in range(LOOPS):
        pass
    return LOOPS / 1e6 / (time.perf_counter() - start)


def versions(root: Path) -> dict[str, Any]:
    """Python and packages, and the commit of a checkout; `changed` says that files differ from it."""
    found: dict[str, Any] = {"python": platform.python_version(), "commit": git(root, "rev-parse", "--short", "HEAD")}
    found["changed"] = bool(git(root, "status", "--porcelain", "--untracked-files=no"))
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
