"""`bifolio replay`: run the receipt of an answer again, or compare two engines with it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from bifolio.cli import commands, options

if TYPE_CHECKING:
    from bifolio.api.llm import LLM
    from bifolio.api.receipts import Receipt
    from bifolio.measure.replay import LayerDrift, Replay

HELP = """Run the receipt of an answer again: the same tokens come out, bit for bit, or the first that differs is shown.

A receipt is the `receipt` of an answer of `bifolio serve` (`"receipt": true`) or of `LLM.generate(receipts=True)`. A
receipt of another model, or of other arithmetic, is refused. An adapter and images, which a receipt names by their
digests, are passed again with `--lora` and `--image`. `--against` and `--against-kernels` run it on a second
engine as well, and show for each layer the first operation that differs, its checksums, and the drift."""
EPILOG = """Examples:

  bifolio replay answer.json --model ./SmolLM2-135M

  bifolio replay answer.json --model smol.gguf --lora ./poems

  bifolio replay answer.json --model smol.gguf --against smol-q4.gguf --plot drift.png

  bifolio replay answer.json --model smol.gguf --against-kernels reference"""


def register(app: commands.App) -> None:
    app.command("replay", help=HELP, epilog=EPILOG)(replay_receipt)


def replay_receipt(
    numerics: options.Numerics,
    receipt: Annotated[Path, commands.argument(help="A file with a receipt, or with an answer that carries one.")],
    model: options.Model = None,
    lora: options.Lora = None,
    image: Annotated[
        list[Path] | None, commands.option("--image", help="Image of the prompt; several times for several, in order.")
    ] = None,
    mmproj: options.Mmproj = None,
    against: Annotated[
        str | None, commands.option("--against", help="A second model: another file or quantisation of the same one.")
    ] = None,
    against_kernels: Annotated[
        str | None, commands.option("--against-kernels", help="Kernels of the second engine: native, reference, torch.")
    ] = None,
    plot: Annotated[Path | None, commands.option("--plot", help="Write a figure of the drift per layer.")] = None,
    as_json: Annotated[bool, commands.option("--json", help="Print one JSON object.")] = False,
) -> None:
    from bifolio.api.images import image_of_file
    from bifolio.api.receipts import read_receipt
    from bifolio.measure.figures import check_target
    from bifolio.measure.replay import check_identity, replay

    check_target(plot)
    known = read_receipt(receipt)
    compares = against is not None or against_kernels is not None
    if plot is not None and not compares:
        raise commands.BadParameter("--plot shows the drift between two engines: pass --against or --against-kernels")
    if compares and image:
        raise commands.BadParameter("operations over images are not compared: leave --against out")
    images = [image_of_file(file) for file in image or []]
    given = {"lora_modules": options.sum_of_adapters(lora), "mmproj": mmproj, **numerics.for_llm()}
    llm = _engine(model, known, given)
    try:
        if not compares:
            check_identity(llm, known)
        found = replay(llm, known, is_foreign=compares, images=images)
        if against_kernels is not None:
            given["kernels"] = against_kernels
        other = None if not compares else _engine(against or model, known, given)
        rows, theirs = ([], None) if other is None else _compared(llm, other, known)
    finally:
        llm.close()
    if plot is not None:
        from bifolio.measure.drift_plot import plot_drift

        plot_drift(rows, plot)
    _show(known, found, theirs, rows, as_json)
    if not found.is_equal or (theirs is not None and not theirs.is_equal):
        raise commands.Exit(1)


def _engine(model: str | None, receipt: Receipt, given: Mapping[str, Any]) -> LLM:
    """An engine that is long enough for the receipt; all its calls use the adapters that are given."""
    from bifolio.api.llm import LLM
    from bifolio.model.loader import load_model
    from bifolio.model.registry import DEFAULT_MODEL

    request, mmproj = receipt["request"], given["mmproj"]
    loaded = load_model(model or DEFAULT_MODEL, mmproj=mmproj)
    length = min(len(request["prompt_token_ids"]) + request["max_tokens"], loaded.config.max_position)
    others = {name: value for name, value in given.items() if name != "mmproj"}
    llm = LLM(loaded, max_model_len=length, max_num_seqs=16, **others)
    llm.lora = options.SUM if given["lora_modules"] else None
    return llm


def _compared(llm: LLM, other: LLM, receipt: Receipt) -> tuple[list[LayerDrift], Replay]:
    """The replay on the second engine, and the layers of both over the tokens up to the first that differs."""
    from bifolio.measure.replay import compare_operations, replay

    with other:
        theirs = replay(other, receipt, is_foreign=True)
        answer = receipt["answer"][0]["token_ids"] if receipt["answer"] else []
        end = theirs.mismatch.position if theirs.mismatch is not None else max(len(answer) - 1, 0)
        tokens = [*receipt["request"]["prompt_token_ids"], *answer[:end]]
        return compare_operations(llm, other, tokens), theirs


def _show(receipt: Receipt, found: Replay, theirs: Replay | None, rows: list[LayerDrift], as_json: bool) -> None:
    from bifolio.measure.replay import drift_record

    if as_json:
        record = {
            "model": receipt["model"],
            "equal": found.is_equal,
            "tokens": found.num_tokens,
            "mismatch": None if found.mismatch is None else found.mismatch._asdict(),
            "against": None if theirs is None else {
                "equal": theirs.is_equal,
                "mismatch": None if theirs.mismatch is None else theirs.mismatch._asdict(),
                "layers": drift_record(rows),
            },
        }  # fmt: skip
        commands.echo(json.dumps(record))
        return
    commands.echo(_sentence(found))
    if theirs is not None:
        commands.echo("second engine: " + _sentence(theirs))
        commands.echo("")
        commands.echo(f"{'layer':>6}  {'first difference':<18} {'checksum':<16}  {'second engine':<16}  drift")
        for row in rows:
            name = row.operation or "none"
            commands.echo(f"{row.layer:>6}  {name:<18} {row.checksums[0]}  {row.checksums[1]}  {row.drift:.2e}")


def _sentence(found: Replay) -> str:
    mismatch = found.mismatch
    if found.is_equal:
        return f"equal: {found.num_tokens} tokens, bit for bit"
    if mismatch is None:
        return f"{found.num_tokens} tokens are equal, their logprobs are not"
    shown = ["the end" if token is None else f"token {token}" for token in (mismatch.expected, mismatch.found)]
    place = f"completion {mismatch.completion} differs from its token {mismatch.position + 1} on"
    return f"{place}: the receipt has {shown[0]}, the replay {shown[1]}"
