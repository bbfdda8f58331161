"""`python -m benchmarks fleet`: a trace on a simulated fleet."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from bifolio.cli import commands, measure_options, options

if TYPE_CHECKING:
    from benchmarks.fleet.simulation import FleetReport, FleetSettings
    from benchmarks.fleet.step_times import StepTimes
    from bifolio.measure.trace_files import TraceRequest

HELP = """Replay a trace on a simulated fleet, and report goodput, hits in the prefix cache and latencies.

The queue, the planner, the block manager and the router are those of the product; only the computation is replaced by
its time, from a measured engine (--measure, --steps; default: Llama-3.1-8B in bf16 on one H200), and the network by
its costs. Lists are separated by commas; every combination of --replicas, --policy and --ratio is run."""
EPILOG = """Examples:

  python -m benchmarks fleet mooncake_conversation.jsonl --replicas 4 --policy "one cache,prefix,least-loaded,random"

  python -m benchmarks fleet azure_conv.csv --replicas 8 --ratio 0,2,4 --speed 20 --plot fleet.png

  python -m benchmarks fleet mooncake_conversation.jsonl --replicas 10,100,1000 --speed-per-replica 0.25

  python -m benchmarks fleet azure_code.csv --measure steps.json -m ./model.gguf"""


def register(app: commands.App) -> None:
    app.command("fleet", help=HELP, epilog=EPILOG)(fleet_verb)


@dataclass(frozen=True)
class FleetOptions:
    """The simulated engines and the network between them."""

    HEADING: ClassVar[str] = "fleet"

    cache_tokens: Annotated[int, commands.option("--cache-tokens", min=1024, help="Tokens of each cache.")] = 800_000
    max_num_seqs: Annotated[int, commands.option("--max-num-seqs", min=1, help="Slots of each engine.")] = 256
    chunk_size: Annotated[int, commands.option("--chunk-size", min=1, help="Tokens of a step.")] = 8192
    grain: Annotated[
        int, commands.option("--grain", min=1, help="Tokens that one simulated token stands for; 512 is a multiple.")
    ] = 32
    miss_weight: Annotated[
        float | None, commands.option("--miss-weight", help="Cost of an uncached token against a waiting one.")
    ] = None
    network_ms: Annotated[float, commands.option("--network-ms", help="Milliseconds of a message.")] = 1.0
    event_ms: Annotated[
        float, commands.option("--event-ms", help="Milliseconds until the router knows of a cached block.")
    ] = 20.0
    bandwidth: Annotated[
        float, commands.option("--bandwidth", help="Gigabits per second from prefill to decode engines.")
    ] = 100.0
    first_token_limit: Annotated[
        float, commands.option("--first-token-limit", help="Seconds to the first token of a good request.")
    ] = 5.0
    per_token_limit: Annotated[
        float, commands.option("--per-token-limit", help="Seconds for each further token of a good request.")
    ] = 0.05

    def settings(self, times: StepTimes) -> FleetSettings:
        from benchmarks.fleet.replica import ReplicaSizes
        from benchmarks.fleet.simulation import FleetSettings

        if 512 % self.grain:
            raise commands.BadParameter(f"--grain divides 512, so 1, 2, 4 ... and not {self.grain}")
        sizes = ReplicaSizes(self.cache_tokens, self.max_num_seqs, self.chunk_size, grain=self.grain)
        return FleetSettings(
            sizes=sizes,
            times=times,
            miss_weight=self.miss_weight,
            network_seconds=self.network_ms / 1e3,
            event_seconds=self.event_ms / 1e3,
            bandwidth=self.bandwidth * 1e9 / 8,
            first_token_limit=self.first_token_limit,
            per_token_limit=self.per_token_limit,
        )


def fleet_verb(
    fleet: FleetOptions,
    engine: measure_options.Measured,
    file: Annotated[Path, commands.argument(help="An Azure .csv or a Mooncake .jsonl trace.")],
    replicas: Annotated[str, commands.option("--replicas", help="Engines, 1 to 1000.")] = "4",
    policy: Annotated[
        str, commands.option("--policy", help="prefix, least-loaded, round-robin, random, 'one cache'.")
    ] = "prefix,least-loaded,random",
    ratio: Annotated[
        str, commands.option("--ratio", help="Prefill engines, of all; the rest decodes. 0: all do both.")
    ] = "0",
    limit: Annotated[
        int | None, commands.option("--limit", min=1, help="Requests from the start of the trace.")
    ] = None,
    speed: Annotated[float, commands.option("--speed", help="Times as fast as recorded.")] = 1.0,
    speed_per_replica: Annotated[
        float | None, commands.option("--speed-per-replica", help="Times as fast as recorded, for each engine.")
    ] = None,
    steps: Annotated[Path | None, commands.option("--steps", help="Step times that --measure has written.")] = None,
    measure: Annotated[
        Path | None, commands.option("--measure", help="Measure an engine on this machine and write its step times.")
    ] = None,
    model: options.Model = None,
    plot: measure_options.Plot = None,
    as_json: measure_options.AsJson = False,
) -> None:
    from bifolio.cli.bench import numbers
    from bifolio.cli.bench_output import progress
    from bifolio.errors import MissingDependencyError
    from bifolio.measure.figures import check_target

    try:
        from benchmarks.fleet.simulation import ONE_CACHE
        from benchmarks.fleet.step_times import H200_8B, StepTimes
    except ImportError as error:
        raise MissingDependencyError(f"the simulation needs {error.name}: pip install 'bifolio[serve]'") from error
    from bifolio.measure.trace_files import read_trace

    check_target(plot)
    times = H200_8B if steps is None else StepTimes.read(steps)
    if measure is not None:
        times = measured(model, measure, engine)
    requests, base = read_trace(file, limit), fleet.settings(times)
    fleets = [
        replace(base, num_replicas=count, policy=name, num_prefill=prefill)
        for count in numbers(replicas, least=1)
        for name in (one.strip() for one in policy.split(","))
        for prefill in (numbers(ratio) if name != ONE_CACHE else [0])
    ]
    with progress(as_json) as note:
        reports = [simulated(wanted, requests, speed, speed_per_replica, note) for wanted in fleets]
    pace_text = f"x {speed:g}" if speed_per_replica is None else f"x {speed_per_replica:g} for each engine"
    heading = f"{file.name}, {len(requests)} requests, arrivals {pace_text}"
    if plot is not None:
        from benchmarks.fleet.plot import plot_fleets

        plot_fleets(reports, plot, heading)
    if as_json:
        runs = [report.as_dict() for report in reports]
        commands.echo(json.dumps({"trace": file.name, "step_times": times.as_dict(), "runs": runs}))
    else:
        print_table(heading, reports, plot)


def print_table(heading: str, reports: list[FleetReport], plot: Path | None) -> None:
    from benchmarks.fleet.table import fleet_table
    from bifolio.cli.bench_output import picture_line, show

    show(fleet_table(heading, reports))
    picture_line(plot)


def simulated(
    wanted: FleetSettings,
    requests: list[TraceRequest],
    speed: float,
    speed_per_replica: float | None,
    note: Callable[[str], None],
) -> FleetReport:
    """One fleet on the whole trace."""
    from benchmarks.fleet.simulation import Fleet

    pace = speed if speed_per_replica is None else speed_per_replica * wanted.num_replicas
    return Fleet(wanted, requests, pace).run(lambda done: note(f"{wanted.name}: {done} of {len(requests)} requests"))


def measured(model: str | None, path: Path, engine: measure_options.Measured) -> StepTimes:
    """Step times of an engine on this machine."""
    from benchmarks.fleet.step_times import StepTimes, measure_steps
    from bifolio.api.llm import LLM

    llm = LLM(model, max_model_len=512, max_num_seqs=8, **engine.for_llm())
    times = StepTimes.fit(measure_steps(llm.engine))
    times.write(path)
    return times
