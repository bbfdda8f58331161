"""Networks with indexers: in deterministic mode the same bits alone, batched, in chunks and after cached prefixes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "model"))

from bifolio import LLM, SamplingParams
from helpers import random_prompt

pytestmark = pytest.mark.full
LENGTHS = (3, 40, 21, 70)  # before and behind the number of chosen positions


@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
def test_results_depend_on_the_request_alone(name: str, device: str) -> None:
    pytest.importorskip("transformers")
    from family_rows import row_folder

    folder = row_folder(name)[1]
    own: dict[str, Any] = {"kernels": "native"} if device == "cpu" else {}
    options: dict[str, Any] = {"device": device, "block_size": 16, "num_blocks": 60, "max_model_len": 96, **own}
    prompts = [{"prompt_token_ids": random_prompt(length, seed=length)} for length in LENGTHS]
    params = [
        SamplingParams(temperature=0.8 * (n % 2), seed=n, max_tokens=9, ignore_eos=True, logprobs=2) for n in range(4)
    ]
    found: list[Any] = []
    for chunk, sequences in ((96, 4), (7, 1)):
        with LLM(
            folder, deterministic=True, chunk_size=chunk, token_budget=96, max_num_seqs=sequences, **options
        ) as llm:
            for _ in range(2):  # the second time prefixes are cached
                outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
                found.append([(o.token_ids, [entry.logprob for entry in o.logprobs or ()]) for o in outputs])
    assert all(each == found[0] for each in found[1:])
