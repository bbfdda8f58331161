"""bifolio's server: `bifolio serve` in processes of its own, and streams of `/v1/completions`."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.engines import Ask, Call, Done, Opening, Unsupported
from benchmarks.engines.bifolio import llm_options

START_SECONDS = 300
CLIENTS = "clients"  # processes that send the requests; the other options are those of `bifolio serve`


class Served:
    """A server, and clients that read every event of every stream."""

    def __init__(self, opening: Opening) -> None:
        from bifolio.measure.load_processes import Target
        from bifolio.model.loader import load_model

        options = llm_options(opening)
        self._clients = int(options.pop(CLIENTS, 1))
        with socket.create_server(("127.0.0.1", 0)) as probe:
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        command = [sys.executable, "-m", "bifolio", "serve", "--model", str(opening.model), *flags]
        self._server = subprocess.Popen([*command, "--port", address.split(":")[1], "--log-level", "warning"])
        self._target = Target(address)
        self._wait()
        self.vocab_size = int(load_model(str(opening.model)).config.vocab_size)

    def _wait(self) -> None:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end and self._server.poll() is None:
            try:
                asyncio.run(self._target.client().model_name())
                return
            except Exception:  # the port is not open yet
                time.sleep(0.1)
        self.close()
        raise RuntimeError("the server did not start")

    def prepare(self, asks: Sequence[Ask]) -> Call:
        from bifolio.measure.load import LoadRequest, Plan
        from bifolio.measure.load_processes import run_clients

        if any(ask.options != asks[0].options for ask in asks) or {"beams", "schema"} & set(asks[0].options):
            raise Unsupported("requests through HTTP have one set of options here")
        plan = Plan([LoadRequest(0.0, ask.prompt, ask.max_tokens) for ask in asks])
        body: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, **asks[0].options}

        def call() -> Done:
            report = run_clients(self._target, plan, body, "benchmark", {}, self._clients)
            failed = [timing.error for timing in report.timings if timing.error]
            if failed:
                raise RuntimeError(f"{len(failed)} requests failed: {failed[0]}")
            cpu = {f"{kind} us/token": 1e6 * report.cpu_per_token(kind) for kind in report.cpu_seconds}
            return Done([[0] * timing.num_output for timing in report.timings], report.seconds, cpu)

        return call

    def reserve(self, sequences: int, length: int) -> None:
        """Sizes are the server's own defaults."""

    def about(self) -> dict[str, str]:
        import bifolio

        return {"bifolio": bifolio.__version__, "path": str(bifolio.__file__)}

    def close(self) -> None:
        self._server.terminate()
        try:
            self._server.wait(60)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
