"""`bifolio bench`: throughput, latency, and traces of production services."""

from __future__ import annotations

import json
from importlib import import_module
from typing import TYPE_CHECKING, Annotated

from bifolio.cli import commands, measure_options, options
from bifolio.cli.bench_output import describe, picture_line, progress, show, title

if TYPE_CHECKING:
    from bifolio.measure.throughput import Test

HELP = "Measure speed: rows as llama-bench prints them, latencies, and replayed request traces."
THROUGHPUT_HELP = """Tokens per second of prompt processing (pp) and generation (tg).

pp512 processes 512 prompt tokens; tg128 generates 128 tokens, @d1024 behind 1024 tokens of context, x8 in 8 sequences
together. Lists are separated by commas; 0 leaves a kind out. Without a model, random weights of a shape are used."""
THROUGHPUT_EPILOG = """Examples:

  bifolio bench throughput -m ./SmolLM2-135M-Instruct.gguf

  bifolio bench throughput --shape S --format q4_0 --prompt 512 --generate 128 --depth 0,1024 --batch 1,8

  bifolio bench throughput -m ./model.gguf --batch 1,2,4,8 --plot throughput.png

  bifolio bench throughput --shape tiny --json | jq '.rows[].tokens_per_second'"""
LATENCY_HELP = """Latency of a batch of equal requests: to the first token, between tokens, and in total."""
LATENCY_EPILOG = """Examples:

  bifolio bench latency -m ./model --prompt 512 --generate 128

  bifolio bench latency --shape S --format q8_0 --batch 4 --plot latency.png"""

# Optional verbs: module -> function that registers them.
GUESTS = {"bifolio.cli.bench_serve": "register_serve"}
MOVED = {"gpu": "gpu", "cluster": "fleet", "targets": "targets", "formats": "formats"}  # names in `benchmarks`


def register(app: commands.App) -> None:
    from bifolio.cli import bench_trace
    from bifolio.cli.moved import moved

    bench = commands.App("bench", HELP, moved={name: moved(f"bench {name}", new) for name, new in MOVED.items()})
    bench.command("throughput", help=THROUGHPUT_HELP, epilog=THROUGHPUT_EPILOG)(throughput)
    bench.command("latency", help=LATENCY_HELP, epilog=LATENCY_EPILOG)(latency)
    bench_trace.register(bench)
    for module_name, function in GUESTS.items():
        try:
            module = import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name != module_name:
                raise
            continue
        getattr(module, function)(bench)
    app.add_app(bench)


def throughput(
    engine: measure_options.SizedEngine,
    model: options.Model = None,
    shape: measure_options.Shape = None,
    format: measure_options.Format = "f32",
    prompt: Annotated[str, commands.option("--prompt", "-p", help="Prompt tokens to process.")] = "512",
    generate: Annotated[str, commands.option("--generate", "-n", help="Tokens to generate.")] = "128",
    depth: Annotated[str, commands.option("--depth", "-d", help="Tokens of context before generation.")] = "0",
    batch: Annotated[str, commands.option("--batch", "-b", help="Sequences that run together.")] = "1",
    repetitions: measure_options.Repetitions = 5,
    plot: measure_options.Plot = None,
    as_json: measure_options.AsJson = False,
) -> None:
    from bifolio.measure.figures import check_target
    from bifolio.measure.random_models import open_model
    from bifolio.measure.throughput import bench_llm, bench_tests, run_tests

    check_target(plot)
    tests = bench_tests(numbers(prompt), numbers(generate), numbers(depth), numbers(batch, least=1))
    if not tests:
        raise commands.BadParameter("nothing to measure: --prompt or --generate must be above 0")
    llm = bench_llm(open_model(model, shape, format), tests, **engine.for_llm())
    with progress(as_json) as note:
        rows = run_tests(llm.engine, tests, repetitions, lambda test, number: note(step_text(test, number)))
    setting = describe(llm, engine.threads)
    if plot is not None:
        from bifolio.measure.speed_plot import plot_throughput

        plot_throughput(rows, plot, title(setting))
    if as_json:
        commands.echo(json.dumps({**setting, "rows": [row.as_dict() for row in rows]}))
        return
    from bifolio.measure.tables import throughput_table

    show(throughput_table(title(setting), rows))
    picture_line(plot)


def latency(
    engine: measure_options.SizedEngine,
    model: options.Model = None,
    shape: measure_options.Shape = None,
    format: measure_options.Format = "f32",
    prompt: Annotated[int, commands.option("--prompt", "-p", min=1, help="Tokens of each prompt.")] = 128,
    generate: Annotated[int, commands.option("--generate", "-n", min=1, help="Tokens generated behind each.")] = 64,
    batch: Annotated[int, commands.option("--batch", "-b", min=1, help="Requests that are sent together.")] = 1,
    repetitions: measure_options.Repetitions = 5,
    plot: measure_options.Plot = None,
    as_json: measure_options.AsJson = False,
) -> None:
    from bifolio.measure.figures import check_target
    from bifolio.measure.latency import measure_latency
    from bifolio.measure.random_models import open_model
    from bifolio.measure.throughput import Test, bench_llm

    check_target(plot)
    test = Test(num_prompt=prompt, num_generated=generate, batch=batch)
    llm = bench_llm(open_model(model, shape, format), [test], **engine.for_llm())
    report = measure_latency(llm.engine, batch=batch, num_prompt=prompt, num_output=generate, repetitions=repetitions)
    setting = describe(llm, engine.threads)
    heading = f"{title(setting)}: {batch} x {prompt} prompt tokens, {generate} generated"
    if plot is not None:
        from bifolio.measure.speed_plot import plot_latency

        plot_latency(report, plot, heading)
    if as_json:
        commands.echo(json.dumps({**setting, **report.as_dict()}))
        return
    from bifolio.measure.tables import latency_table

    show(latency_table(heading, report))
    picture_line(plot)


def numbers(text: str, least: int = 0) -> list[int]:
    """'1,8,16' -> [1, 8, 16]."""
    try:
        values = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise commands.BadParameter(f"{text!r} is not a list of whole numbers such as 1,8,16") from None
    if not values or min(values) < least:
        raise commands.BadParameter(f"{text!r}: every number must be at least {least}")
    return values


def step_text(test: Test, repetition: int) -> str:
    return f"{test.name}, run {repetition + 1}"
