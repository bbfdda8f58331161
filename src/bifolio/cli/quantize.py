"""`bifolio quantize`: a model in another format, from and to folders and GGUF files."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from bifolio.cli import commands, options
from bifolio.config import NUMERICS

if TYPE_CHECKING:
    from bifolio.cli.progress import Report
    from bifolio.model.gguf.mixes import Mix
    from bifolio.model.gguf.writer import Progress, WriteReport, WrittenTensor
    from bifolio.model.loaded import LoadedModel

HELP = """Write a model in another format.

SOURCE is a folder, a .gguf file, a llama2.c .bin file or the name of a model. TARGET is a .gguf file, or a folder for
dense formats. The target appears only when it is complete.

Formats: q4_k_m, q4_k_s, q5_k_m, q5_k_s, q6_k, iq4_nl, iq4_xs (the mixes of llama.cpp), q8_0, q4_0, q4_1, f16, bf16,
f32."""
EPILOG = """Examples:

  bifolio quantize ./SmolLM2-135M smol.q4_0.gguf --format q4_0

  bifolio quantize ./SmolLM2-135M smol.q4_k_m.gguf --format q4_k_m --imatrix smol.imatrix.gguf

  bifolio quantize smol.q4_0.gguf ./smol-folder --format bf16

  bifolio quantize ./model model.q8_0.gguf --format q8_0 --eval story.txt"""


def register(app: commands.App) -> None:
    app.command(help=HELP, epilog=EPILOG)(quantize)


def quantize(
    source: Annotated[str, commands.argument(help="The model to read.")],
    target: Annotated[Path, commands.argument(help="File NAME.gguf or folder to write.")],
    format_name: Annotated[
        str, commands.option("--format", "-f", help="q4_k_m, q5_k_m, q6_k, iq4_xs, q8_0, f16 or another: see below.")
    ],
    imatrix: Annotated[
        Path | None,
        commands.option("--imatrix", help="A file of `bifolio imatrix`: columns that matter more weigh more."),
    ] = None,
    force: Annotated[bool, commands.option("--force", help="Replace the target if it exists.")] = False,
    evaluate: Annotated[
        Path | None, commands.option("--eval", help="A text file: show the perplexity on it before and after.")
    ] = None,
    eval_tokens: Annotated[int, commands.option("--eval-tokens", help="The most tokens of the text to score.")] = 4096,
    activations: options.Activations = NUMERICS.activations,
    threads: options.Threads = NUMERICS.threads,
    as_json: Annotated[bool, commands.option("--json", help="Print one JSON object.")] = False,
) -> None:
    from bifolio.cli.progress import bytes_bar
    from bifolio.engine.memory import weight_bytes
    from bifolio.model.file_access import check_target
    from bifolio.model.gguf.mixes import parse_mix
    from bifolio.model.loader import load_model
    from bifolio.text.utf8 import read_text

    mix = parse_mix(format_name)
    check_target(target, overwrite=force)
    text = None if evaluate is None else read_text(evaluate, "--eval")
    model = load_model(source)
    with bytes_bar("converting") as bar:
        report = write(target, model, mix, imatrix, force, counted(bar, weight_bytes(model.weights)))
    scores = None
    if not as_json:
        print_report(report)
    if text is not None:
        before = score(model, text, eval_tokens, threads, activations)
        after = score(load_model(target), text, eval_tokens, threads, activations)
        scores = {"before": before, "after": after}
    if as_json:
        commands.echo(json.dumps({**as_record(report), "perplexity": scores}))
    elif scores is not None:
        commands.echo(f"perplexity       {before:.4f} before, {after:.4f} after ({(after / before - 1) * 100:+.2f} %)")


def write(
    target: Path, model: LoadedModel, mix: Mix, imatrix: Path | None, force: bool, progress: Progress
) -> WriteReport:
    if target.suffix.lower() == ".gguf":
        from bifolio.model.gguf.imatrix import read_importance
        from bifolio.model.gguf.writer import write_gguf

        importance = None if imatrix is None else read_importance(imatrix)
        return write_gguf(target, model, mix, overwrite=force, progress=progress, importance=importance)
    from bifolio.model.huggingface.folder_writer import write_folder

    return write_folder(target, model, mix.format, overwrite=force, progress=progress)


def counted(show: Report, total: int) -> Progress:
    """The bytes of the converted tensors so far, for a bar."""
    done = 0

    def add(line: WrittenTensor) -> None:
        nonlocal done
        done += line.old_bytes
        show(min(done, total), total)  # vectors are not part of the total

    return add


def as_record(report: WriteReport) -> dict[str, Any]:
    tensors = [
        {"from": line.old_format.name, "to": line.new_format.name, "bytes_before": line.old_bytes,
         "bytes_after": line.new_bytes}
        for line in report.tensors
    ]  # fmt: skip
    return {"path": str(report.path), "bytes_before": report.old_bytes, "bytes_after": report.new_bytes,
            "tensors": tensors, "notes": list(report.notes)}  # fmt: skip


def print_report(report: WriteReport) -> None:
    """Tensors and bytes by format, before and after."""
    from rich.console import Console
    from rich.table import Table

    from bifolio.engine.memory import show_bytes

    table = Table("from", "to", "tensors", "before", "after", "ratio", box=None)
    groups: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    for line in report.tensors:
        groups[line.old_format.name, line.new_format.name].append((line.old_bytes, line.new_bytes))
    for (old_format, new_format), sizes in sorted(groups.items()):
        old, new = (sum(column) for column in zip(*sizes, strict=True))
        table.add_row(old_format, new_format, str(len(sizes)), show_bytes(old), show_bytes(new), f"{old / new:.2f}")
    old, new = report.old_bytes, report.new_bytes
    table.add_row("all", "", str(len(report.tensors)), show_bytes(old), show_bytes(new), f"{old / new:.2f}")
    Console(width=100).print(table)
    for note in report.notes:
        commands.echo(f"note: {note}", err=True)
    commands.echo(f"wrote {report.path}")


def score(model: LoadedModel, text: str, max_tokens: int, threads: int | None, activations: str) -> float:
    from bifolio.api.llm import LLM
    from bifolio.cli.progress import steps_bar
    from bifolio.measure.perplexity import WINDOW, text_perplexity

    length = min(model.config.max_position, WINDOW + 1)
    llm = LLM(
        model,
        max_model_len=length,
        max_num_seqs=1,
        enable_prefix_caching=False,
        threads=threads,
        activations=activations,
    )
    with steps_bar("scoring") as progress:
        return text_perplexity(llm, text, max_tokens=max_tokens, progress=progress).value
