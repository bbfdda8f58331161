"""Two prefill and two decode replicas on a Ray cluster: answers are those of one engine, also after a lost replica."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest
from cluster_load import Load, client_of, replica_processes, texts_of_one_engine
from serving import ENGINE, model_folder

from helpers import random_prompt

pytestmark = pytest.mark.skipif(find_spec("ray") is None or find_spec("zmq") is None, reason="needs the extra cluster")
PORT = 18_212
OPTIONS = {**ENGINE, "kernels": "native", "threads": 1}
TOPICS = ["a little fox", "two birds", "the old king", "a quiet sea"]
PROMPTS = [f"Once upon a time there was {topic}. " * 4 for topic in TOPICS]  # longer than the threshold
CACHED = 119 // 8 * 8  # tokens of a prompt of 120 that arrive in blocks of 8


@cache
def expected() -> dict[str, str]:
    return texts_of_one_engine(PROMPTS, OPTIONS)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    from bifolio.cluster import run
    from bifolio.cluster.application import ClusterSettings

    expected()
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 5, "object_store_memory": 80 << 20})
    try:
        run.connect(nodes.address)
        settings = ClusterSettings(
            model=str(model_folder()), model_name="tiny", replicas=2, prefill_replicas=2, num_cpus=1, front_end_cpus=1,
            prefill_threshold=32, engine=OPTIONS,
        )  # fmt: skip
        run.deploy(settings, "127.0.0.1", PORT, proxies="HeadOnly")
        yield
    finally:
        with contextlib.suppress(Exception):
            serve.shutdown()
        ray.shutdown()
        nodes.shutdown()


def ask(prompt: list[int], **options: Any) -> Any:
    body: Any = {"max_tokens": 16, "temperature": 0.8, "seed": 5, "logprobs": 2, **options}
    return client_of(PORT).completions.create(model="tiny", prompt=prompt, extra_body={"ignore_eos": True}, **body)


def cached(answer: Any) -> int:
    return int(answer.usage.prompt_tokens_details.cached_tokens or 0)


def wait_for_transfers(first_seed: int) -> None:
    """Until both prefill replicas run and the blocks of a new prompt come from one of them."""
    from bifolio.cluster import run

    for seed in range(first_seed, first_seed + 400):
        engines = run.status()["deployments"]["prefill-engines"]["replicas"]
        if engines.get("RUNNING", 0) == 2 and cached(ask(random_prompt(120, seed=seed, vocab_size=250))) == CACHED:
            return
        time.sleep(0.3)
    raise AssertionError(engines)


@pytest.mark.slow
def test_answers_are_those_of_one_engine(cluster: None) -> None:
    """Sampled tokens and logprobs, bit for bit; the decode replicas compute the last tokens of each prompt alone."""
    from bifolio import LLM, SamplingParams

    wait_for_transfers(1000)
    params = SamplingParams(max_tokens=16, temperature=0.8, seed=5, logprobs=2, ignore_eos=True)
    with LLM(model_folder(), **OPTIONS) as llm:
        for seed in range(6):
            prompt = random_prompt(120, seed=seed, vocab_size=250)
            found = ask(prompt)
            (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
            assert found.choices[0].text == output.outputs[0].text
            wanted = [entry[token].logprob for entry, token in zip(
                output.outputs[0].logprobs, output.outputs[0].token_ids, strict=True)]  # fmt: skip
            assert found.choices[0].logprobs.token_logprobs == wanted
            assert cached(found) == CACHED
    assert cached(ask([7] * 30)) == 0  # shorter than the threshold
    assert len(replica_processes("prefill-engines")) == len(replica_processes("engines")) == 2


@pytest.mark.slow
def test_a_killed_prefill_replica_costs_a_computation(cluster: None) -> None:
    """Under load: every answer is whole and right, and the blocks come from both replicas again afterwards."""
    wait_for_transfers(2000)
    with Load(PORT, expected()) as clients:
        clients.wait_for(4)
        os.kill(replica_processes("prefill-engines")[0].pid, signal.SIGKILL)
        for seed in range(20, 30):  # new prompts, some of them for the lost replica
            assert len(ask(random_prompt(120, seed=seed, vocab_size=250)).choices[0].logprobs.tokens) == 16
        clients.wait_for(8)
        wait_for_transfers(3000)
        clients.wait_for(4)
    assert not clients.wrong
    assert clients.retryable == 0
