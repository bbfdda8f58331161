"""Memory of the machine: in all and free, within the limits of the control groups of this process.

A limit may be set on any group above the process (a container, a slice of systemd). Pages of files that a group has
read count as used there and are given back on demand, so they are free.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")


class _Files(NamedTuple):
    """Names of the files of a group."""

    limit: str
    used: str
    of_files: tuple[str, ...]  # lines of memory.stat


_UNIFIED = _Files("memory.max", "memory.current", ("active_file", "inactive_file"))
_LEGACY = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file"))


class GroupMemory(NamedTuple):
    """One limited group."""

    limit: int
    free: int


def free_memory() -> int:
    """Bytes this process can still allocate: available memory, limited by its control groups."""
    return max(min([_available_memory(), *(group.free for group in limited_groups())]), 0)


def total_memory() -> int:
    """Bytes of memory of this machine, or of its smallest control group."""
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        import psutil

        total = int(psutil.virtual_memory().total)
    return min([total, *(group.limit for group in limited_groups())])


def limited_groups(groups: Path = GROUPS, own_groups: Path = OWN_GROUPS) -> Iterator[GroupMemory]:
    """The groups of this process and those above them that have a limit."""
    for folder, files in _group_folders(groups, own_groups):
        try:
            limit = int((folder / files.limit).read_text())  # "max": no limit
            used = int((folder / files.used).read_text())
            stat = dict(line.split(maxsplit=1) for line in (folder / "memory.stat").read_text().splitlines())
            of_files = sum(int(stat.get(name, 0)) for name in files.of_files)
        except (OSError, ValueError):
            continue
        yield GroupMemory(limit, limit - max(used - of_files, 0))


def _group_folders(groups: Path, own_groups: Path) -> Iterator[tuple[Path, _Files]]:
    """The folder of each group of this process, then those above it; a container sees its own as the topmost."""
    try:
        lines = own_groups.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base, files = (groups / "memory", _LEGACY) if controllers else (groups, _UNIFIED)
        own = base / name.strip("/")
        for folder in (own, *own.parents):
            yield folder, files
            if folder == base:
                break


def _available_memory() -> int:
    """Memory available without swapping; on Linux from /proc/meminfo, without importing psutil."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        import psutil

        return int(psutil.virtual_memory().available)
