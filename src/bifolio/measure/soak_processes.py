"""The processes of a server as the system shows them: their role, memory, files and threads."""

from __future__ import annotations

import os
import time
from pathlib import Path


def part_of(pid: int, front: int) -> str:
    """The role of a process of the server."""
    if pid == front:
        return "front end"
    return "engine" if b"bifolio.serve.process.worker" in command_line(pid) else "helpers"


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def own_memory(pid: int) -> int:
    """Bytes of memory of its own: pages of mapped files, such as weights, come and go."""
    try:
        _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()
        return (int(resident) - int(shared)) * os.sysconf("SC_PAGESIZE")
    except (OSError, IndexError, ValueError):
        return 0


def count_of(pid: int, name: str) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/{name}"))
    except OSError:
        return 0


def slowdown(cpu_seconds: float = 0.01) -> float:
    """Wall-clock time of a little work by its CPU time: 1 on a free core, n where n programs share it."""
    began, used = time.perf_counter(), time.thread_time()
    while time.thread_time() - used < cpu_seconds:
        pass
    return max(1.0, (time.perf_counter() - began) / cpu_seconds)
