"""`bifolio merge`: a model with adapters added to its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from bifolio.cli import commands
from bifolio.config import MAX_LORA_RANK

HELP = """Add adapters (LoRA) to the weights of a model.

BASE is a folder, a .gguf file or the name of a model. TARGET is a .gguf file, or a folder for dense formats. The
target needs no adapter any more, and it appears only when it is complete. Weights are rounded to the format after the
sum: an adapter beside a quantised base keeps more of its changes."""
EPILOG = """Examples:

  bifolio merge ./model ./merged --lora ./adapter --format bf16

  bifolio merge model.q8_0.gguf merged.gguf --lora style.gguf:0.5 --lora ./facts --format q8_0"""


def register(app: commands.App) -> None:
    app.command(help=HELP, epilog=EPILOG)(merge)


def merge(
    base: Annotated[str, commands.argument(help="The model to read.")],
    target: Annotated[Path, commands.argument(help="File NAME.gguf or folder to write.")],
    lora: Annotated[
        list[str] | None,
        commands.option("--lora", help="Adapter as PATH or PATH:SCALE; repeatable: their sum."),
    ] = None,
    format_name: Annotated[
        str, commands.option("--format", "-f", help="Format of the matrices, as of `bifolio quantize`.")
    ] = "f16",
    force: Annotated[bool, commands.option("--force", help="Replace the target if it exists.")] = False,
    as_json: Annotated[bool, commands.option("--json", help="Print one JSON object.")] = False,
) -> None:
    from bifolio.cli.options import path_and_scale
    from bifolio.cli.quantize import as_record, print_report, write
    from bifolio.model.adapters.adapter import combined, read_adapter
    from bifolio.model.adapters.merge import merged
    from bifolio.model.file_access import check_target
    from bifolio.model.gguf.mixes import parse_mix
    from bifolio.model.loader import load_model

    if not lora:
        raise commands.BadParameter("--lora is missing: name at least one adapter")
    mix = parse_mix(format_name)
    check_target(target, overwrite=force)
    model = load_model(base)
    parts = [path_and_scale(each) for each in lora]
    adapter = combined(
        [(read_adapter(path, model.config, MAX_LORA_RANK, model.weights.pooler), scale) for path, scale in parts]
    )
    report = write(target, merged(model, adapter), mix, None, force, lambda line: None)
    if as_json:
        commands.echo(json.dumps({**as_record(report), "rank": adapter.rank, "parameters": adapter.num_parameters}))
    else:
        print_report(report)
