"""Time per kernel of decode steps on the GPU."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

import torch

NUM_STEPS = 10


def profile_steps(engine: Any, sequences: int) -> dict[str, Any]:
    """Microseconds per step of the wall clock, of the busy device, and of each kernel (name, us, launches per step)."""
    while engine.batcher.num_waiting or any(
        len(slot.held.output_token_ids) < 3 for slot in engine.batcher.active_slots()
    ):
        engine.step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(NUM_STEPS):
        engine.step()
    torch.cuda.synchronize()
    step = (time.perf_counter() - start) / NUM_STEPS
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(NUM_STEPS):
            engine.step()
        torch.cuda.synchronize()
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for event in profiler.events():
        if "cuda" in str(event.device_type).lower():
            entry = totals[_short(event.name)]
            entry[0] += event.time_range.elapsed_us()
            entry[1] += 1
    kernels = [
        (name, round(total / NUM_STEPS, 1), round(count / NUM_STEPS, 1)) for name, (total, count) in totals.items()
    ]
    kernels.sort(key=lambda item: -item[1])
    return {
        "step_us": round(step * 1e6, 1),
        "busy_us": round(sum(item[1] for item in kernels), 1),
        "kernels": kernels[:25],
    }


def _short(name: str) -> str:
    return name.replace("void ", "").split("<")[0].split("(")[0][-60:]
