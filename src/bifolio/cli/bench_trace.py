"""`bifolio bench trace`: replay the requests of a production service."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from bifolio.cli import commands, measure_options, options

if TYPE_CHECKING:
    from bifolio.api.llm import LLM
    from bifolio.measure.trace import TraceReport
    from bifolio.measure.trace_files import TraceRequest
    from bifolio.model.loaded import LoadedModel

HELP = """Replay a trace of requests in real time and report waiting times, speed and the use of the cache.

Reads the Azure (CSV) and Mooncake (JSON lines) formats. Prompts are random tokens of the recorded lengths; in
Mooncake traces, equal hash ids become equal tokens, so prefixes are shared as they were. Lengths are multiplied by
--scale, arrivals are --speed times as fast (0: all at once, as --compare does unless --speed is given)."""
EPILOG = """Examples:

  bifolio bench trace azure_conv.csv --limit 200 --scale 0.25 --speed 10 --plot trace.png

  bifolio bench trace azure_conv.csv --compare static

  bifolio bench trace mooncake_conversation.jsonl --limit 100 --scale 0.02 --json"""


def register(bench: commands.App) -> None:
    bench.command("trace", help=HELP, epilog=EPILOG)(trace)


@dataclass(frozen=True)
class TraceEngine(measure_options.Measured):
    """The engine that replays a trace."""

    num_blocks: Annotated[int | None, commands.option("--num-blocks", help="Blocks of the cache.")] = None
    memory: options.Memory = None
    max_model_len: options.MaxModelLen = None
    max_num_seqs: options.MaxNumSeqs = 32
    block_size: options.BlockSize = 16
    chunk_size: options.ChunkSize = 512
    prefix_caching: Annotated[bool, commands.option(help="Share cache blocks of equal prompt prefixes.")] = True
    kv_offload: options.KvOffload = None
    kv_offload_dir: options.KvOffloadDir = None
    kv_offload_disk: options.KvOffloadDisk = None

    def shared(self) -> dict[str, Any]:
        """The arguments of `LLM` that both kinds of batching take; each has its own pool of blocks."""
        own = ("num_blocks", "memory", "max_model_len", "prefix_caching", *self.tiers())
        return {name: value for name, value in self.for_llm().items() if name not in own}

    def tiers(self) -> dict[str, Any]:
        """The tiers below the cache of continuous batching."""
        return {
            "kv_offload": self.kv_offload, "kv_offload_dir": self.kv_offload_dir,
            "kv_offload_disk": self.kv_offload_disk,
        }  # fmt: skip


def trace(
    engine: TraceEngine,
    file: Annotated[Path, commands.argument(help="An Azure .csv or a Mooncake .jsonl trace.")],
    model: options.Model = None,
    shape: measure_options.Shape = None,
    format: measure_options.Format = "f32",
    limit: Annotated[int, commands.option("--limit", min=1, help="Take this many requests from the start.")] = 200,
    scale: Annotated[float, commands.option("--scale", help="Multiply prompt and output lengths by this.")] = 0.25,
    speed: Annotated[
        float | None,
        commands.option(
            "--speed", min=0, help="Times as fast as recorded; 0: all at once; default: 1, with --compare 0."
        ),
    ] = None,
    compare: Annotated[str | None, commands.option("--compare", help="'static': also run static batching.")] = None,
    seed: Annotated[int, commands.option("--seed", help="Seed of the random tokens.")] = 0,
    plot: measure_options.Plot = None,
    as_json: measure_options.AsJson = False,
) -> None:
    from bifolio.api.llm import LLM
    from bifolio.cli.bench_output import describe
    from bifolio.measure.figures import check_target
    from bifolio.measure.random_models import open_model
    from bifolio.measure.trace_files import longest, make_prompts, read_trace, scaled

    check_target(plot)
    if compare not in (None, "static"):
        raise commands.BadParameter(f"--compare takes 'static', not {compare!r}")
    if speed is None:  # kinds of batching differ under load: requests that arrive slowly never wait
        speed = 1.0 if compare is None else 0.0
    loaded = open_model(model, shape, format)
    recorded = read_trace(file, limit)
    length = min(engine.max_model_len or longest(recorded, scale), loaded.config.max_position)
    requests, num_cut = scaled(recorded, scale, length)
    prompts = make_prompts(requests, loaded.config.vocab_size, seed)
    llm = LLM(
        loaded,
        num_blocks=engine.num_blocks,
        memory=engine.memory,
        max_model_len=length,
        enable_prefix_caching=engine.prefix_caching,
        **engine.tiers(),
        **engine.shared(),
    )
    reports = replay_all(llm, loaded, requests, prompts, speed, engine, compare is not None, as_json)
    setting = {**describe(llm, engine.threads), "trace": file.name, "limit": limit, "scale": scale, "speed": speed,
               "max_num_seqs": engine.max_num_seqs, "max_model_len": length, "num_cut": num_cut}  # fmt: skip
    report_runs(f"{file.name}, {len(requests)} requests, lengths x {scale:g}, {arrival_text(speed)}",
                setting, reports, plot, as_json)  # fmt: skip


def replay_all(
    llm: LLM,
    model: LoadedModel,
    requests: list[TraceRequest],
    prompts: list[list[int]],
    speed: float,
    engine: TraceEngine,
    compare: bool,
    as_json: bool,
) -> list[TraceReport]:
    """The replay with continuous batching, and both kinds of static batching if they are to be compared."""
    from bifolio.cli.bench_output import progress
    from bifolio.measure.trace import replay

    with progress(as_json) as note:
        reports = [
            replay(llm.engine, requests, prompts, speed=speed,
                   on_progress=lambda done: note(f"continuous batching: {done} of {len(requests)} requests"))
        ]  # fmt: skip
        if compare:
            reports += run_comparison(model, requests, prompts, speed, engine.shared(), note)
    return reports


def report_runs(
    heading: str, setting: dict[str, Any], reports: list[TraceReport], plot: Path | None, as_json: bool
) -> None:
    """Print the runs as a table or as JSON, and draw them."""
    from bifolio.cli.bench_output import picture_line, show, title
    from bifolio.measure.tables import trace_table

    heading = f"{heading}\n{title(setting)}"
    if plot is not None:
        from bifolio.measure.trace_plot import plot_trace

        plot_trace(reports, plot, heading)
    if as_json:
        commands.echo(json.dumps({**setting, "runs": [report.as_dict() for report in reports], **ratios(reports)}))
        return
    show(trace_table(heading, reports))
    if setting["num_cut"]:
        commands.echo(f"{setting['num_cut']} prompts were cut to fit into {setting['max_model_len']} tokens")
    for name, ratio in ratios(reports).items():
        commands.echo(f"{name.replace('_', ' ')}: {ratio:.2f}")
    picture_line(plot)


def run_comparison(
    model: LoadedModel,
    requests: list[TraceRequest],
    prompts: list[list[int]],
    speed: float,
    engine_options: dict[str, Any],
    note: Any,
) -> list[TraceReport]:
    """Both kinds of static batching, with a pool in which every batch fits whole."""
    from bifolio.api.llm import LLM
    from bifolio.measure.static_batch import run_static, static_model_len

    length = min(static_model_len(requests), model.config.max_position)
    rows, block_size = engine_options["max_num_seqs"], engine_options["block_size"]
    reports = []
    for padded in (True, False):
        llm = LLM(
            model,
            max_model_len=length,
            num_blocks=rows * (-(-length // block_size) + 1) + 2,
            enable_prefix_caching=False,
            **engine_options,
        )
        reports.append(
            run_static(llm.engine, requests, prompts, batch_size=rows, padded=padded, speed=speed,
                       on_progress=lambda done: note(f"static batching: {done} of {len(requests)} requests"))
        )  # fmt: skip
    return reports


def ratios(reports: list[TraceReport]) -> dict[str, float]:
    """Ratios of the first run to the others: output tokens per second, and CPU time."""
    found = {}
    for report in reports[1:]:
        name = report.name.replace(", ", "_")
        found[f"throughput_of_continuous_over_{name}"] = reports[0].output_speed / report.output_speed
        found[f"cpu_time_of_{name}_over_continuous"] = report.cpu_seconds / reports[0].cpu_seconds
    return found


def arrival_text(speed: float) -> str:
    return f"arrivals x {speed:g}" if speed > 0 else "all at once"
