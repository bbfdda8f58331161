"""Starting and stopping the application: on a Ray of its own (`bifolio serve --replicas`), or on a running one."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import ray
from ray import serve

from bifolio.cluster.application import ClusterSettings, build
from bifolio.errors import ConfigError

logger = logging.getLogger(__name__)
APPLICATION = "bifolio"


@contextlib.contextmanager
def local_ray(settings: ClusterSettings) -> Iterator[None]:
    """A Ray of this machine alone, with enough logical CPUs for the application."""
    replicas = max(settings.replicas, settings.max_replicas or 0) + settings.prefill_replicas
    needed = math.ceil(replicas * settings.num_cpus + settings.front_ends * settings.front_end_cpus)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(
        address="local",
        num_cpus=max(needed, os.cpu_count() or 1),
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.WARNING,
    )
    try:
        yield
    finally:
        with contextlib.suppress(Exception):
            serve.shutdown()
        ray.shutdown()


def connect(address: str) -> None:
    """Join a running Ray cluster."""
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
    except ConnectionError as error:
        raise ConfigError(f"no Ray cluster answers at {address!r}: start one with `ray start --head`") from error


def deploy(settings: ClusterSettings, host: str, port: int, proxies: str = "EveryNode") -> None:
    """Start the application, or update it replica by replica where it runs already; returns when it is ready.

    `proxies`: the nodes that listen, "EveryNode" or "HeadOnly".
    """
    serve.start(proxy_location=proxies, http_options={"host": host, "port": port})
    try:
        serve.run(build(msgspec.to_builtins(settings)), name=APPLICATION, route_prefix="/")
    except RuntimeError as error:
        raise ConfigError(f"the application could not be deployed: {error}") from error


def status() -> dict[str, Any]:
    """The state of the application and its deployments, with the number of replicas in each state."""
    found = serve.status().applications.get(APPLICATION)
    if found is None:
        raise ConfigError("the application does not run here: start it with `bifolio cluster deploy`")
    deployments = {
        name: {"status": one.status.value, "message": one.message, "replicas": dict(one.replica_states)}
        for name, one in found.deployments.items()
    }
    return {"status": found.status.value, "message": found.message, "deployments": deployments}


def delete() -> None:
    """End the application after its requests; Ray stays."""
    serve.delete(APPLICATION)


def serve_locally(settings: ClusterSettings, host: str, port: int) -> None:
    """Serve from several replicas on this machine until told to stop."""
    stopped = threading.Event()
    with local_ray(settings):
        for number in (signal.SIGINT, signal.SIGTERM):  # after Ray has installed handlers of its own
            signal.signal(number, lambda *_: stopped.set())
        deploy(settings, host, port)
        logger.info("serving", extra={"address": f"http://{host}:{port}", "replicas": settings.replicas})
        stopped.wait()
        logger.info("draining")
