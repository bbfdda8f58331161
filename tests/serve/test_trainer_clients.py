"""TRL's `VLLMClient` and prime-rl's admin and rollout clients, unchanged, against a server.

`BIFOLIO_TEST_TRAINERS` names a folder with the packages `trl` (0.29, the last with a server of its own), `prime_rl`,
`renderers` and `tenacity`, as `pip install --no-deps --target` lays them out.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import RunningServer, running_server
from trainer_clients import GREEDY, PROMPT

from bifolio import LLM, LanguageModel, SamplingParams
from helpers import fresh_folder, tiny_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
CLIENTS = Path(__file__).with_name("trainer_clients.py")
PARAMS = SamplingParams(temperature=0.8, max_tokens=10, logprobs=0, **GREEDY)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def packages() -> Path:
    folder = Path(os.environ.get("BIFOLIO_TEST_TRAINERS", "missing"))
    if not folder.is_dir():
        pytest.skip("set BIFOLIO_TEST_TRAINERS to a folder with the packages of the trainers")
    return folder


@pytest.fixture(scope="module")
def weights() -> tuple[Path, Path]:
    one, other = (
        tiny_folder(fresh_folder("trainers"), tokenizer=True, seed=seed, max_position_embeddings=1024)
        for seed in (0, 1)
    )
    return one, other


@pytest.fixture
def server(weights: tuple[Path, Path]) -> Iterator[RunningServer]:
    with running_server(engine={"model": str(weights[0])}, allow_updates=True) as running:
        yield running


def run_client(packages: Path, kind: str, server: RunningServer, *arguments: str) -> dict[str, Any]:
    if not (packages / ("trl" if kind == "trl" else "prime_rl")).is_dir():
        pytest.skip(f"BIFOLIO_TEST_TRAINERS has no package for {kind}")
    command = [sys.executable, str(CLIENTS), kind, server.url, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(packages)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def expected_of(folder: Path, prompt: list[int] = PROMPT) -> tuple[list[int], list[float]]:
    llm = LLM(folder, kernels="reference", max_model_len=64, num_blocks=32)
    [output] = llm.generate({"prompt_token_ids": prompt}, PARAMS)
    scored = output.outputs[0].logprobs or []
    return output.outputs[0].token_ids, [entry.logprob for entry in scored]


def test_trl(packages: Path, server: RunningServer, weights: tuple[Path, Path]) -> None:
    """Rollouts, a communicator, all parameters of a model one by one, and rollouts of these."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    found = run_client(packages, "trl", server, *map(str, weights), str(port))
    for name, folder, count in (("before", weights[0], 4), ("after", weights[1], 2)):
        tokens, logprobs = expected_of(folder)
        rollouts = found[name]
        assert len(rollouts["completion_ids"]) == count
        assert rollouts["prompt_ids"] == [PROMPT] * (count // 2)
        assert rollouts["completion_ids"][0] == tokens
        assert [one[0] for one in rollouts["logprobs"][0]] == pytest.approx(logprobs, abs=1e-5)
    cut = found["cut"]
    assert cut["prompt_ids"] == [PROMPT[-4:]]
    assert cut["completion_ids"][0] == expected_of(weights[1], PROMPT[-4:])[0]
    assert all(len(values) == 3 for values in cut["logprobs"][0])
    with server.http() as http:
        assert (
            http.post("/update_named_param/", json={"name": "a", "dtype": "torch.float32", "shape": [1]}).status_code
            == 400
        )


def test_prime_rl(packages: Path, server: RunningServer, weights: tuple[Path, Path]) -> None:
    """Health, rollouts by token ids, a pause, weights of a folder, and scores of a prompt."""
    import torch

    found = run_client(packages, "prime", server, *map(str, weights))
    for name, folder in (("before", weights[0]), ("after", weights[1])):
        tokens, logprobs = expected_of(folder)
        assert found[name]["completion_ids"] == tokens
        assert found[name]["completion_logprobs"] == pytest.approx(logprobs, abs=1e-5)
    scored = LanguageModel.from_pretrained(weights[1]).token_logprobs(torch.tensor([PROMPT]))[0]
    assert found["scored"] == pytest.approx([0.0, *scored.tolist()], abs=1e-4)
