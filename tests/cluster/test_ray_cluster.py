"""A Ray cluster of two nodes on this machine: right answers, lost replicas and nodes, capacity that returns."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from typing import Any

import openai
import psutil
import pytest
from serving import ENGINE, model_folder

pytestmark = pytest.mark.skipif(find_spec("ray") is None or find_spec("zmq") is None, reason="needs the extra cluster")
PORT = 18_211
ENGINES = "ray::ServeReplica:bifolio:engines"
NUM_TOKENS = 120
SIZES: Any = {"model_name": "tiny", "replicas": 2, "num_cpus": 3, "front_end_cpus": 1}  # one engine for each node
PROMPTS = ["Once upon a time", "The fox", "A long way", "In the morning", "Some words", "Two birds"]


@cache
def expected() -> dict[str, str]:
    """The text of every prompt, from the offline API."""
    from bifolio import LLM, SamplingParams

    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    outputs = LLM(model_folder(), **ENGINE).generate(PROMPTS, params, use_tqdm=False)
    return {prompt: output.outputs[0].text for prompt, output in zip(PROMPTS, outputs, strict=True)}


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
    return openai.OpenAI(base_url=f"http://127.0.0.1:{PORT}/v1", api_key="none", max_retries=0, timeout=60)


def engine_processes() -> list[psutil.Process]:
    running = psutil.process_iter(["cmdline"])
    return [process for process in running if " ".join(process.info["cmdline"] or []).startswith(ENGINES)]


class Load:
    """Clients that stream all prompts again and again and check every piece of text."""

    def __init__(self) -> None:
        self.whole, self.retryable, self.wrong = 0, 0, []  # type: ignore[var-annotated]
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(index,)) for index in range(4)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(90)
        assert not any(thread.is_alive() for thread in self._threads)

    def _run(self, index: int) -> None:
        number = index
        while not self._stopped.is_set():
            prompt = PROMPTS[number % len(PROMPTS)]
            number += 1
            text = ""
            body: dict[str, Any] = {"max_tokens": NUM_TOKENS, "temperature": 0.0, "extra_body": {"ignore_eos": True}}
            try:
                for chunk in client().completions.create(model="tiny", prompt=prompt, stream=True, **body):
                    text += chunk.choices[0].text
            except openai.APIStatusError as error:
                self._failed(error.status_code == 503, error)
            except openai.APIError as error:  # an error event in the stream, or a closed connection
                self._failed(error.code == "engine_unavailable", error)
            else:
                if text == expected()[prompt]:
                    self.whole += 1
                else:
                    self.wrong.append((prompt, text))
            if not expected()[prompt].startswith(text):
                self.wrong.append((prompt, text))

    def _failed(self, is_retryable: bool, error: Exception) -> None:
        if is_retryable:
            self.retryable += 1
        else:
            self.wrong.append(repr(error))

    def wait_for(self, more: int, seconds: float = 60.0) -> None:
        """Until so many more streams are complete."""
        goal, end = self.whole + more, time.monotonic() + seconds
        while self.whole < goal:
            assert time.monotonic() < end, (self.whole, goal, self.retryable, self.wrong)
            time.sleep(0.05)


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
    with Load() as load:
        load.wait_for(4)
        os.kill(engine_processes()[0].pid, signal.SIGKILL)
        load.wait_for(8)
        wait_for_engines(2)
        load.wait_for(8)
    assert not load.wrong
    assert load.retryable <= 8


@pytest.mark.slow
def test_a_lost_node_costs_its_streams_only(cluster: Any) -> None:
    wait_for_engines(2)
    with Load() as load:
        load.wait_for(4)
        (worker,) = cluster.worker_nodes
        cluster.remove_node(worker, allow_graceful=False)
        load.wait_for(8)
        cluster.add_node(num_cpus=3, object_store_memory=80 << 20)
        wait_for_engines(2)
        load.wait_for(8)
    assert not load.wrong


@pytest.mark.slow
def test_an_update_replaces_replicas_without_a_failed_request(cluster: Any) -> None:
    """A second deployment with another setting: old replicas drain while new ones start."""
    from bifolio.cluster import run
    from bifolio.cluster.application import ClusterSettings

    wait_for_engines(2)
    before = {process.pid for process in engine_processes()}
    engine = {**ENGINE, "num_blocks": 256}
    settings = ClusterSettings(model=str(model_folder()), **SIZES, engine=engine)
    with Load() as load:
        load.wait_for(2)
        run.deploy(settings, "127.0.0.1", PORT, proxies="HeadOnly")  # the nodes share one address here
        wait_for_engines(2)
        load.wait_for(4)
    assert not load.wrong
    assert load.retryable == 0
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
    with pytest.raises(ConfigError, match="did you mean 'replicas'"):
        settings_of({"replica": 2})
