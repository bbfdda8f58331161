"""A Ray cluster of two nodes on this machine: right answers, lost replicas and nodes, capacity that returns."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from typing import Any

import openai
import psutil
import pytest
from cluster_load import NUM_TOKENS, Load, client_of, replica_processes, texts_of_one_engine
from serving import ENGINE, model_folder

pytestmark = pytest.mark.skipif(find_spec("ray") is None or find_spec("zmq") is None, reason="needs the extra cluster")
PORT = 18_211
SIZES: Any = {"model_name": "tiny", "replicas": 2, "num_cpus": 3, "front_end_cpus": 1}  # one engine for each node
PROMPTS = ["Once upon a time", "The fox", "A long way", "In the morning", "Some words", "Two birds"]


@cache
def expected() -> dict[str, str]:
    return texts_of_one_engine(PROMPTS, ENGINE)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    from bifolio.cluster import run
    from bifolio.cluster.application import ClusterSettings

    expected()
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "object_store_memory": 80 << 20})
    nodes.add_node(num_cpus=3, object_store_memory=80 << 20)
    try:
        run.connect(nodes.address)
        settings = ClusterSettings(model=str(model_folder()), **SIZES, engine=dict(ENGINE))
        run.deploy(settings, "127.0.0.1", PORT, proxies="HeadOnly")  # the nodes share one address here
        yield nodes
    finally:
        with contextlib.suppress(Exception):
            serve.shutdown()
        ray.shutdown()
        nodes.shutdown()


def client() -> openai.OpenAI:
    return client_of(PORT)


def engine_processes() -> list[psutil.Process]:
    return replica_processes("engines")


def load() -> Load:
    return Load(PORT, expected())


def wait_for_engines(count: int, seconds: float = 90.0) -> None:
    """Until so many engines run and are known to the router."""
    from bifolio.cluster import run

    end = time.monotonic() + seconds
    while True:
        engines = run.status()["deployments"]["engines"]["replicas"]
        if engines.get("RUNNING", 0) == count and len(engine_processes()) == count:
            return
        assert time.monotonic() < end, engines
        time.sleep(0.2)


@pytest.mark.slow
def test_answers_are_those_of_one_engine(cluster: Any) -> None:
    wait_for_engines(2)
    for prompt, text in expected().items():
        answer = client().completions.create(
            model="tiny", prompt=prompt, max_tokens=NUM_TOKENS, temperature=0.0, extra_body={"ignore_eos": True}
        )
        assert answer.choices[0].text == text
    chat = [{"role": "user", "content": "Hello"}]
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    answer = client().chat.completions.create(model="tiny", messages=chat, max_tokens=40, response_format=form)
    assert json.loads(answer.choices[0].message.content or "")["n"] in (1, 2)
    with pytest.raises(openai.BadRequestError) as refused:
        client().completions.create(model="tiny", prompt=[1] * 600, max_tokens=4)
    assert refused.value.code == "context_length_exceeded"


@pytest.mark.slow
def test_prefixes_find_their_replica(cluster: Any) -> None:
    """Conversations that begin alike in pairs: every later turn finds its earlier ones cached."""
    wait_for_engines(2)
    histories = {number: [number + 3] * 64 for number in range(6)}
    for turn in range(3):
        for number, history in histories.items():
            history += [turn * 7 + number + 9] * 32
            answer = client().completions.create(model="tiny", prompt=history, max_tokens=1)
            details = answer.usage.prompt_tokens_details if answer.usage else None
            if turn:
                assert details is not None
                assert (details.cached_tokens or 0) >= len(history) - 40


@pytest.mark.slow
def test_a_killed_replica_costs_its_streams_only(cluster: Any) -> None:
    wait_for_engines(2)
    with load() as clients:
        clients.wait_for(4)
        os.kill(engine_processes()[0].pid, signal.SIGKILL)
        clients.wait_for(8)
        wait_for_engines(2)
        clients.wait_for(8)
    assert not clients.wrong
    assert clients.retryable <= 8


@pytest.mark.slow
def test_a_lost_node_costs_its_streams_only(cluster: Any) -> None:
    wait_for_engines(2)
    with load() as clients:
        clients.wait_for(4)
        (worker,) = cluster.worker_nodes
        cluster.remove_node(worker, allow_graceful=False)
        clients.wait_for(8)
        cluster.add_node(num_cpus=3, object_store_memory=80 << 20)
        wait_for_engines(2)
        clients.wait_for(8)
    assert not clients.wrong


@pytest.mark.slow
def test_an_update_replaces_replicas_without_a_failed_request(cluster: Any) -> None:
    """A second deployment with another setting: old replicas drain while new ones start."""
    from bifolio.cluster import run
    from bifolio.cluster.application import ClusterSettings

    wait_for_engines(2)
    before = {process.pid for process in engine_processes()}
    engine = {**ENGINE, "num_blocks": 256}
    settings = ClusterSettings(model=str(model_folder()), **SIZES, engine=engine)
    with load() as clients:
        clients.wait_for(2)
        run.deploy(settings, "127.0.0.1", PORT, proxies="HeadOnly")  # the nodes share one address here
        wait_for_engines(2)
        clients.wait_for(4)
    assert not clients.wrong
    assert clients.retryable == 0
    assert not before & {process.pid for process in engine_processes()}


@pytest.mark.full
def test_the_application_is_built_from_settings() -> None:
    """Without a cluster: a config file's arguments become deployments with their resources and the router."""
    from bifolio.cluster.application import build, settings_of
    from bifolio.errors import ConfigError

    application = build({"model": str(model_folder()), "replicas": 3, "num_gpus": 1, "num_cpus": 4})
    engines = application._bound_deployment.init_args[0]._bound_deployment
    assert engines.num_replicas == 3
    assert engines.ray_actor_options == {"num_cpus": 4.0, "num_gpus": 1.0}
    router = engines._deployment_config.request_router_config
    assert router.get_request_router_class().__name__ == "PrefixAffinityRouter"
    scaled = build({"max_replicas": 5})._bound_deployment.init_args[0]._bound_deployment
    policy = scaled._deployment_config.autoscaling_config.policy.get_policy()
    assert policy.__name__ == "by_waiting_requests"
    phases = build({"replicas": 3, "prefill_replicas": 2, "prefill_threshold": 100, "engine": {"threads": 2}})
    front_end = phases._bound_deployment
    decode, prefill = (front_end.init_args[index]._bound_deployment for index in (0, 2))
    assert (decode.num_replicas, prefill.num_replicas) == (3, 2)
    assert (decode.name, prefill.name) == ("engines", "prefill-engines")
    assert decode.init_kwargs == {"role": "decode", "prefill_threshold": 100}
    assert prefill.init_kwargs == {"role": "prefill"}
    assert decode.init_args[0]["threads"] == prefill.init_args[0]["threads"] == 2
    assert front_end.init_args[1]["prefill_threshold"] == 100
    with pytest.raises(ConfigError, match="did you mean 'replicas'"):
        settings_of({"replica": 2})
