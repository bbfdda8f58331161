"""Nothing is kept of requests that are over: memory after the second thousand is that after the first."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from helpers import tiny_folder

PROGRAM = """
import gc, json, sys
import numpy as np
import psutil
from bifolio import LLM, SamplingParams

llm = LLM(sys.argv[1], kernels="reference", block_size=4, num_blocks=120, max_model_len=64, max_num_seqs=16)
rng = np.random.default_rng(0)
process = psutil.Process()


def thousand():
    done = 0
    while done < 1000:
        prompts = [rng.integers(3, 300, rng.integers(1, 12)).tolist() for _ in range(50)]
        limits = rng.integers(1, 5, 50).tolist()
        params = [SamplingParams(max_tokens=limit, n=1 + limit % 2, logprobs=1) for limit in limits]
        doomed = set(rng.choice(50, 10, replace=False).tolist())
        honest = llm.engine.step

        def step_and_abort():
            for number in list(doomed):
                if rng.random() < 0.2:
                    doomed.discard(number)
                    llm.engine.abort(f"request-{first + number}")
            return honest()

        first = done_before + done
        llm.engine.step = step_and_abort
        outputs = llm.generate(prompts, params)
        llm.engine.step = honest
        ends.update(completion.finish_reason for output in outputs for completion in output.outputs)
        done += len(outputs)
    gc.collect()
    return process.memory_info().rss


ends, sizes = set(), []
for done_before in (0, 1000):
    sizes.append(thousand())
print(json.dumps({"sizes": sizes, "ends": sorted(ends), "used": llm.engine.blocks.num_used_blocks,
                  "kept": len(llm.engine.requests)}))
"""


@pytest.mark.full
def test_memory_after_two_thousand_requests_is_that_after_one_thousand() -> None:
    folder = tiny_folder(tokenizer=True)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder)], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    first, second = found["sizes"]
    assert "abort" in found["ends"]
    assert "length" in found["ends"]
    assert (found["used"], found["kept"]) == (0, 0)
    assert second <= first * 1.02, f"{first} bytes after 1,000 requests, {second} after 2,000"
