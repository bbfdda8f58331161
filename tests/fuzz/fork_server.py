"""Runs cases in forked children with limits: a case that crashes, hangs or takes memory harms no other.

    parent ──fork──▶ child: case, case, case, ...     one line of JSON for each on a pipe
           ◀─────── a child that dies is replaced; the case it was at has failed

The libraries are imported once, so a case costs about as much as the work it does. Each case has a limit on CPU
seconds; the peak of its resident memory is read from the system.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bifolio.errors import BifolioError

CPU_SECONDS = 10  # a case that takes longer hangs
WALL_SECONDS = 900.0  # on a machine that is busy with other things
MEMORY_BYTES = 512 << 20  # resident, above that of the valid file
ADDRESS_BYTES = 1 << 30  # of address space, above that of the idle process
CASES_PER_CHILD = 200
Run = Callable[[int], str]  # case -> outcome; raises a named error for a refusal


@dataclass
class Report:
    """The outcomes of all cases."""

    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    largest_growth: int = 0  # bytes of resident memory
    slowest_seconds: float = 0.0  # of CPU time

    def as_dict(self) -> dict[str, Any]:
        return {
            "cases": sum(self.outcomes.values()),
            "failures": len(self.failures),
            "largest_growth_mib": round(self.largest_growth / (1 << 20), 1),
            "slowest_cpu_seconds": round(self.slowest_seconds, 2),
            "outcomes": dict(self.outcomes.most_common()),
        }


def run_cases(first: int, count: int, run: Run, label: Callable[[int], str], progress: int = 0) -> Report:
    """Run cases [first, first + count); `label` names one in a failure."""
    report = Report()
    case, end = first, first + count
    while case < end:
        case = _run_child(case, min(end, case + CASES_PER_CHILD), run, label, report)
        if progress and (case - first) % progress < CASES_PER_CHILD:
            print(f"{case - first} cases, {len(report.failures)} failures", flush=True)
    return report


def _run_child(first: int, end: int, run: Run, label: Callable[[int], str], report: Report) -> int:
    """Run cases in one child until one of them ends it; the first case that is left."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.close(reader)
            _serve(first, end, run, writer)
        finally:
            os._exit(0)
    os.close(writer)
    case = first
    problem = "the case took too long"
    with os.fdopen(reader, "rb") as lines:
        while case < end:
            ready, _, _ = select.select([lines], [], [], WALL_SECONDS)
            line = lines.readline() if ready else b""
            if not line:
                break
            _note(json.loads(line), label, report)
            case += 1
        if case < end and not ready:
            os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if case == end:
        return case
    if os.WIFSIGNALED(status):
        problem = f"signal {signal.Signals(os.WTERMSIG(status)).name}"
    report.outcomes["killed"] += 1
    report.failures.append(f"{label(case)}: {problem}")
    print(report.failures[-1], flush=True)
    return case + 1


def _note(found: dict[str, Any], label: Callable[[int], str], report: Report) -> None:
    report.outcomes[found["outcome"]] += 1
    report.largest_growth = max(report.largest_growth, found["growth"])
    report.slowest_seconds = max(report.slowest_seconds, found["seconds"])
    if found["problem"]:
        report.failures.append(f"{label(found['case'])}: {found['problem']}")
    elif found["growth"] > MEMORY_BYTES:
        report.failures.append(f"{label(found['case'])}: {found['growth'] >> 20} MiB of memory")


def _serve(first: int, end: int, run: Run, descriptor: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * resource.getpagesize() + ADDRESS_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for case in range(first, end):
        used = resource.getrusage(resource.RUSAGE_SELF)
        limit = int(used.ru_utime + used.ru_stime) + 1 + CPU_SECONDS
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
        before = _peak(reset=True)
        began, problem = time.process_time(), ""
        try:
            outcome = run(case)
        except BifolioError as error:
            outcome = type(error).__name__
            problem = "" if str(error) else "an error without a message"
        except BaseException as error:
            outcome = problem = f"{type(error).__name__}: {error}"[:300]
        seconds = time.process_time() - began
        found = {"case": case, "outcome": outcome.partition(":")[0], "problem": problem, "seconds": seconds,
                 "growth": _peak() - before}  # fmt: skip
        os.write(descriptor, json.dumps(found).encode() + b"\n")


def _peak(reset: bool = False) -> int:
    """Bytes: the peak of the resident memory since the last reset."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    return 0
