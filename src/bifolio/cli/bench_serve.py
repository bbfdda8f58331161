"""`bifolio bench serve`: load on any OpenAI-compatible server."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from bifolio.cli import commands, measure_options

if TYPE_CHECKING:
    from bifolio.measure.load import LoadReport, LoadRequest, Plan

HELP = """Put load on a server and report waiting times, speed and goodput.

Requests come by --rate (open loop: a Poisson process), by --concurrency (closed loop: a fixed number in flight), or as
a --trace recorded them. Lengths are 128, 64:256 (evenly between) or 128~0.5 (lognormal: median and spread)."""
EPILOG = """Examples:

  bifolio bench serve --url http://127.0.0.1:8000/v1 --concurrency 16 --requests 200

  bifolio bench serve --rate 4 --requests 200 --prompt 128~0.6 --output 16:256 --limits ttft:500,tpot:50 --plot load.png

  bifolio bench serve --trace azure_conv.csv --scale 0.1 --speed 5 --requests 300 --json"""


def register_serve(bench: commands.App) -> None:
    bench.command("serve", help=HELP, epilog=EPILOG)(serve)


@dataclass(frozen=True)
class Load:
    """The requests that are sent: their number, lengths and times."""

    HEADING: ClassVar[str] = "load"

    requests: Annotated[int, commands.option("--requests", "-n", min=1, help="Number of requests.")] = 100
    concurrency: Annotated[
        int | None, commands.option("--concurrency", "-c", min=1, help="Requests in flight at any time (closed loop).")
    ] = None
    rate: Annotated[float | None, commands.option("--rate", help="Requests per second; inf: all at once.")] = None
    burstiness: Annotated[float, commands.option("--burstiness", help="1: Poisson; smaller: in bursts.")] = 1.0
    prompt: Annotated[str, commands.option("--prompt", help="Length of a prompt in tokens.")] = "128"
    output: Annotated[str, commands.option("--output", help="Length of an answer in tokens.")] = "64"
    shared: Annotated[int, commands.option("--shared-prefix", min=0, help="Tokens that all prompts begin with.")] = 0
    trace: Annotated[Path | None, commands.option("--trace", help="An Azure .csv or a Mooncake .jsonl trace.")] = None
    scale: Annotated[float, commands.option("--scale", help="Multiply the trace's lengths by this.")] = 1.0
    speed: Annotated[float, commands.option("--speed", help="Times as fast as recorded.")] = 1.0
    max_model_len: Annotated[int, commands.option("--max-model-len", help="Longest prompt plus output.")] = 2048
    vocab_size: Annotated[int, commands.option("--vocab-size", min=2, help="Random token ids are below this.")] = 256
    seed: Annotated[int, commands.option("--seed", help="Seed of lengths, arrivals and tokens.")] = 0

    def plan(self) -> tuple[Plan, str]:
        """The requests, and the load in words."""
        from bifolio.errors import ConfigError
        from bifolio.measure.load import Plan

        if sum(option is not None for option in (self.concurrency, self.rate, self.trace)) > 1:
            raise ConfigError("choose one of --concurrency, --rate and --trace")
        if self.trace is not None:
            return Plan(self._recorded(self.trace)), f"{self.trace.name}, {self.speed:g} times as fast"
        if self.rate is not None:
            return Plan(self._drawn()), f"{self.rate:g} requests/s"
        size = self.concurrency or 8
        return Plan(self._drawn(), size), f"{size} at a time"

    def _drawn(self) -> list[LoadRequest]:
        import numpy as np

        from bifolio.measure.load import Lengths, LoadRequest, arrivals

        count, generator = self.requests, np.random.default_rng(self.seed)
        prefix = generator.integers(0, self.vocab_size, self.shared).tolist()
        due = [0.0] * count if self.rate is None else arrivals(count, self.rate, generator, self.burstiness)
        lengths = (Lengths(self.prompt).draw(count, generator), Lengths(self.output).draw(count, generator))
        return [
            LoadRequest(moment, prefix + generator.integers(0, self.vocab_size, num_prompt).tolist(), num_output)
            for moment, num_prompt, num_output in zip(due, *lengths, strict=True)
        ]

    def _recorded(self, path: Path) -> list[LoadRequest]:
        from bifolio.errors import ConfigError
        from bifolio.measure.load import LoadRequest
        from bifolio.measure.trace_files import make_prompts, read_trace, scaled

        if not self.speed > 0:
            raise ConfigError(f"--speed must be above 0, not {self.speed:g}")
        recorded, num_cut = scaled(read_trace(path, self.requests), self.scale, self.max_model_len)
        if num_cut:
            print(f"{num_cut} prompts were cut to fit into {self.max_model_len} tokens", file=sys.stderr)
        prompts = make_prompts(recorded, self.vocab_size, self.seed)
        return [
            LoadRequest(request.arrival / self.speed, tokens, request.num_output)
            for request, tokens in zip(recorded, prompts, strict=True)
        ]


def serve(
    load: Load,
    url: Annotated[str, commands.option("--url", help="Base URL of the server.")] = "http://127.0.0.1:8000/v1",
    key: Annotated[
        str | None, commands.option("--api-key", variable="OPENAI_API_KEY", help="API key of the server.")
    ] = None,
    model: Annotated[
        str | None,
        commands.option("--served-model-name", help="Model to request; default: the first that the server lists."),
    ] = None,
    ignore_eos: Annotated[bool, commands.option(help="Ask for answers of full length (not OpenAI's own).")] = True,
    temperature: Annotated[float, commands.option("--temperature", help="0 is greedy.")] = 0.0,
    limits: Annotated[
        str | None,
        commands.option("--limits", help="Latency limits of goodput, in ms: ttft:500,tpot:50,itl:200,e2e:5000."),
    ] = None,
    clients: Annotated[
        int,
        commands.option(
            "--clients", min=1, help="Processes that send the requests, so that clients are not the limit."
        ),
    ] = 1,
    timeout: Annotated[float, commands.option("--timeout", help="Seconds that a request may take.")] = 600.0,
    plot: measure_options.Plot = None,
    as_json: measure_options.AsJson = False,
) -> None:
    import asyncio

    from bifolio.measure.figures import check_target
    from bifolio.measure.load import parse_limits
    from bifolio.measure.load_client import LoadClient
    from bifolio.measure.load_processes import Target, run_clients

    plan, name = load.plan()
    check_target(plot)
    served = model or asyncio.run(LoadClient(url, key=key, timeout=timeout).model_name())
    body = {"model": served, "temperature": temperature, **({"ignore_eos": True} if ignore_eos else {})}
    report = run_clients(Target(url, key, timeout), plan, body, name, parse_limits(limits), clients)
    if plot is not None:
        from bifolio.measure.load_plot import plot_load

        plot_load(report, plot)
    if as_json:
        json.dump(report.as_dict(), sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        show(report)


def show(report: LoadReport) -> None:
    from rich.console import Console

    from bifolio.measure.load import LIMIT_NAMES
    from bifolio.measure.statistics import Distribution, show_seconds
    from bifolio.measure.tables import new_table

    figures = report.as_dict()
    table = new_table(report.plan_name, "", "mean", "p50", "p90", "p99", "max")
    names = {"ttft": "first token", "tpot": "per token after it", "itl": "between events", "e2e": "whole request"}
    for name in LIMIT_NAMES:
        value = Distribution.of(report.values(name))
        cells = (value.mean, value.p50, value.p90, value.p99, value.max)
        table.add_row(names[name], *(show_seconds(seconds) for seconds in cells))
    console = Console()
    console.print(table)
    console.print(f"  requests          {figures['requests']}, of which {figures['failed']} failed", highlight=False)
    console.print(f"  duration          {show_seconds(report.seconds)}", highlight=False)
    console.print(f"  requests/s        {figures['requests_per_second']:.2f}", highlight=False)
    console.print(f"  output tokens/s   {figures['output_tokens_per_second']:.1f}", highlight=False)
    for kind, label in (("front_end", "front end"), ("engine", "engine")):
        if kind in report.cpu_seconds:
            cpu = 1e6 * report.cpu_per_token(kind)
            console.print(f"  CPU of {label:11s}{cpu:.1f} us per output token", highlight=False)
    if report.limits:
        share = f"{100 * figures['goodput_share']:.1f} % within the limits"
        console.print(f"  goodput           {figures['goodput_requests_per_second']:.2f} requests/s, {share}")
    for error in figures["errors"]:
        console.print(f"  failed: {error}", highlight=False, markup=False)
