"""Find Linux-only code outside of conditions: the sources must compile for macOS without a machine to try it on.

python scripts/check_portable.py        # names every place; ends with status 1 if there is one
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LINUX_ONLY = re.compile(
    r"#\s*include\s*<(?:linux/|asm/|sys/(?:auxv|syscall|prctl|epoll|eventfd|sysinfo|sendfile)\.h|sched\.h|malloc\.h|"
    r"features\.h|numa)|\b(?:MAP_POPULATE|MAP_HUGETLB|MADV_HUGEPAGE|MADV_POPULATE_\w+|SYS_\w+|cpu_set_t|CPU_SET|"
    r"sched_[gs]etaffinity|getauxval|malloc_trim|pthread_[gs]etaffinity_np|pthread_getcpuclockid)\b"
)
CONDITION = re.compile(r"\s*#\s*(?P<kind>if|ifdef|ifndef|elif|else|endif)\b(?P<rest>.*)")
COMMENT = re.compile(r"//.*|/\*.*?\*/")


def places(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of Linux-only code that no condition about the system, or about the name itself, encloses."""
    conditions: list[str] = []
    for number, line in enumerate(source.splitlines(), 1):
        match = CONDITION.match(line)
        if match is not None:
            kind, rest = match["kind"], match["rest"].strip()
            if kind in ("if", "ifdef", "ifndef"):
                conditions.append("" if kind == "ifndef" else rest)
            elif kind == "endif":
                if conditions:
                    conditions.pop()
            elif conditions:
                conditions[-1] = rest if kind == "elif" else ""
            continue
        found = LINUX_ONLY.search(COMMENT.sub("", line))
        if found is not None and not any("__linux__" in each or found[0] in each for each in conditions):
            yield number, line.strip()


def main() -> int:
    found = 0
    for path in sorted((ROOT / "native").rglob("*")):
        if path.suffix in (".h", ".cpp"):
            for number, line in places(path.read_text(encoding="utf-8")):
                print(f"{path.relative_to(ROOT)}:{number}: only on Linux: {line}")
                found += 1
    return min(found, 1)


if __name__ == "__main__":
    sys.exit(main())
