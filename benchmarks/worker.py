"""A process with one open engine: it reads a workload per line and writes its figures per line.

    -> {"column": "bifolio", "model": "S-q4_0.gguf", "device": "cpu", "threads": 2, "clock": "wall", ...}
    <- RESULT {"about": {...}, "seconds": 1.2}              from the start of the process to the first token
    -> {"workload": "decode1", "seed": 1}
    <- RESULT {"value": 207.1, "details": {}}               or {"unsupported": "..."}, {"error": "..."}

Other lines are output of libraries. Imported in the processes of other engines: the standard library is enough.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from benchmarks.columns import Column
from benchmarks.engines import Ask, Engine, Opening, Unsupported, open_engine
from benchmarks.workload_list import WORKLOADS
from benchmarks.workloads import CLOCKS, Trial

MARK = "RESULT "


def answer(message: dict[str, Any]) -> None:
    print(MARK + json.dumps(message), flush=True)


def opened(spec: dict[str, Any]) -> Engine:
    """The engine of a column, after its first token."""
    column = Column.parse(spec["column"])
    opening = Opening(Path(spec["model"]), column.options, spec["device"], spec["threads"])
    engine = open_engine(column.engine, opening)
    trial = Trial(engine, seed=0)
    trial.timed([Ask(trial.tokens(16), 1)])
    answer({"seconds": time.time() - spec["spawned"], "peak": peak_megabytes(), "about": engine.about()})
    return engine


def peak_megabytes() -> float:
    """Of this process since it began; the counter of `resource` begins with that of the parent."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:")), 0.0)


def measure(engine: Engine, spec: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    workload = WORKLOADS[request["workload"]]
    trial = Trial(engine, request["seed"], CLOCKS[spec["clock"]])
    value = (workload.tiny() if spec["tiny"] else workload).run(trial)
    return {"value": value, "details": trial.details}


def guarded(work: Any, *arguments: Any) -> Any:
    """The result; failures become an answer, so that other rows are measured."""
    try:
        return work(*arguments)
    except Unsupported as error:
        answer({"unsupported": str(error)})
    except Exception as error:
        traceback.print_exc()
        answer({"error": f"{type(error).__name__}: {error}"})
    return None


def main() -> None:
    spec = json.loads(sys.stdin.readline())
    engine = guarded(opened, spec)
    if engine is None:
        return
    for line in sys.stdin:
        found = guarded(measure, engine, spec, json.loads(line))
        if found is not None:
            answer(found)
    engine.close()


if __name__ == "__main__":
    main()
