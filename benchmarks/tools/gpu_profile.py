"""Time per kernel of decode steps on a GPU, through `LLM` on a model folder.

python -m benchmarks.tools.gpu_profile llama-1b --models /dev/shm/models --loads 1x300,64x2048,200x800
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

NUM_STEPS = 10


def profile_steps(engine: Any) -> dict[str, Any]:
    """Microseconds per step of the wall clock, of the busy device, and of each kernel (name, us, launches per step)."""
    import torch

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
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(NUM_STEPS):
            engine.step()
        torch.cuda.synchronize()
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for event in profiler.events():
        if "cuda" in str(event.device_type).lower():
            entry = totals[_short(event.name)]
            entry[0] += event.time_range.elapsed_us()
            entry[1] += 1
    kernels = [(name, round(us / NUM_STEPS, 1), round(count / NUM_STEPS, 1)) for name, (us, count) in totals.items()]
    kernels.sort(key=lambda item: -item[1])
    busy = round(sum(item[1] for item in kernels), 1)
    return {"step_us": round(step * 1e6, 1), "busy_us": busy, "kernels": kernels[:25]}


def _short(name: str) -> str:
    return name.replace("void ", "").split("<")[0].split("(")[0][-60:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a model of the rows, such as llama-1b")
    parser.add_argument("--models", type=Path, default=Path("out/models"), help="folder for model files")
    parser.add_argument("--loads", default="1x300,64x2048,200x800", help="sequences x tokens of context")
    parser.add_argument("--deterministic", action="store_true")
    options = parser.parse_args()
    from benchmarks.models import ModelStore
    from bifolio import LLM, SamplingParams
    from bifolio.errors import ConfigError
    from bifolio.kernels.select import require_gpu

    try:
        require_gpu("cuda")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    llm = LLM(ModelStore(options.models).path(options.model), device="cuda", deterministic=options.deterministic)
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, detokenize=False)
    for load in options.loads.split(","):
        count, length = map(int, load.split("x"))
        for number in range(count):
            prompt = [4 + (31 * number + 7 * place) % 1000 for place in range(length)]
            llm.engine.add_request(f"profile-{number}", prompt, params)
        print(json.dumps({"sequences": count, "length": length, **profile_steps(llm.engine)}), flush=True)
        llm.engine.abort_all()
        while llm.engine.has_work:
            llm.engine.step()
    return 0


if __name__ == "__main__":
    sys.exit(main())
