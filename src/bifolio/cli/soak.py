"""`bifolio soak`: a server under chaos, checked against exact answers."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from bifolio.cli import commands, options

HELP = """Run a server under chaos and compare its answers with exact ones.

Hostile requests, clients that leave, and kills of the engine run beside clients whose every answer is compared. The
command fails on a wrong answer, growing memory, blocks in use at the end, or an answer that takes too long."""
EPILOG = """Examples:

  bifolio soak --minutes 1

  bifolio soak --minutes 30 --plot soak.png"""


def register(app: commands.App) -> None:
    app.command("soak", help=HELP, epilog=EPILOG)(soak)


def soak(
    numerics: options.Numerics,
    model: options.Model = None,
    minutes: Annotated[float, commands.option("--minutes", help="Length of the run, in minutes.")] = 1.0,
    clients: Annotated[int, commands.option("--clients", help="Clients whose answers are compared.")] = 4,
    chaos: Annotated[int, commands.option("--chaos", help="Clients that send hostile requests.")] = 2,
    kill_every: Annotated[
        float, commands.option("--kill-every", help="Seconds between kills of the engine; 0: none.")
    ] = 45.0,
    max_wait: Annotated[float, commands.option("--max-wait", help="Most seconds of an exact answer.")] = 30.0,
    plot: Annotated[Path | None, commands.option("--plot", help="File for a picture of the run (PNG).")] = None,
    seed: Annotated[int, commands.option("--seed", help="Seed of the order of requests.")] = 0,
) -> None:
    from bifolio.measure.figures import check_target
    from bifolio.measure.soak import Soak, SoakPlan

    check_target(plot)
    plan = SoakPlan(
        seconds=60.0 * minutes,
        model=model,
        oracle_clients=clients,
        chaos_clients=chaos,
        kill_every=kill_every,
        max_wait=max_wait,
        seed=seed,
        numerics=asdict(numerics),
    )
    report = Soak(plan).run()
    if plot is not None:
        from bifolio.measure.soak_plot import plot_soak

        plot_soak(report, plot)
    print(json.dumps(report.as_dict(), indent=2))
    if report.problems:
        sys.exit(1)
