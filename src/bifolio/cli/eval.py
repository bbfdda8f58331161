"""`bifolio eval`: how well a model predicts a text."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from bifolio.cli import commands, options

if TYPE_CHECKING:
    from bifolio.api.llm import LLM

HELP = """Measure the perplexity of a model on a text file, or its score on a task.

The text is cut into windows that do not overlap; every token but the first of a window is predicted from the
tokens before it in the window. Lower is better: exp of the mean loss per token.

A task is a file of JSON lines with a prompt and the right answer, or choices; or, where lm-eval is installed, the name
of one of its tasks or the .yaml file of one. Its certificate holds the digests of
task, model and arithmetic and the hash of every answer: it is the same for every batch size, order and cache.
`bifolio eval compare A B` pairs two certificates of one task, item by item."""
EPILOG = """Examples:

  bifolio eval story.txt

  bifolio eval wiki.txt.xz --model ./SmolLM2-135M --window 2048 --json

  bifolio eval --task sums.jsonl --model smol.gguf --certificate smol.json

  bifolio eval --task sums.jsonl --model smol.gguf --verify smol.json

  bifolio eval --task sums.jsonl --model smol.gguf --lora ./sums

  bifolio eval --task gsm8k --limit 100 --model smol.gguf

  bifolio eval compare smol.json smol-q4.json"""


def register(app: commands.App) -> None:
    app.command("eval", help=HELP, epilog=EPILOG)(evaluate)


def evaluate(
    numerics: options.Numerics,
    text: Annotated[Path | None, commands.argument(help="A text file, plain or .xz; or the word compare.")] = None,
    first: Annotated[Path | None, commands.argument(help="After compare: a certificate.")] = None,
    second: Annotated[Path | None, commands.argument(help="After compare: a certificate of the same task.")] = None,
    model: options.Model = None,
    lora: options.Lora = None,
    window: Annotated[
        int | None, commands.option("--window", help="Length of a window in tokens; default: 512.")
    ] = None,
    max_tokens: Annotated[
        int | None, commands.option("--max-tokens", "-n", help="Number of tokens to score; default: all.")
    ] = None,
    task: Annotated[
        str | None,
        commands.option("--task", help="A file of JSON lines (prompt and answer, or choices), or a task of lm-eval."),
    ] = None,
    limit: Annotated[
        int | None, commands.option("--limit", help="Number of items of a task, from the first; default: all.", min=1)
    ] = None,
    certificate: Annotated[
        Path | None, commands.option("--certificate", help="Write the certificate of the task to this file.")
    ] = None,
    verify: Annotated[
        Path | None, commands.option("--verify", help="A certificate of the task, which this run must repeat.")
    ] = None,
    max_num_seqs: Annotated[
        int | None, commands.option("--max-num-seqs", help="Sequences of a task that run together; default: 16.", min=1)
    ] = None,
    as_json: Annotated[bool, commands.option("--json", help="Print one JSON object.")] = False,
) -> None:
    if text == Path("compare") and first is not None and second is not None:
        return _compare(first, second, as_json)
    if first is not None or second is not None or (text is None) == (task is None):
        raise commands.BadParameter("pass a text file, --task FILE, or compare and two certificates")
    given = {"lora_modules": options.sum_of_adapters(lora), **numerics.for_llm()}
    if text is None or task is not None:
        if window is not None or max_tokens is not None:
            raise commands.BadParameter("--window and --max-tokens belong to a text file: leave them out")
        return _evaluate_task(given, model, task or "", limit, (certificate, verify), max_num_seqs, as_json)
    if certificate is not None or verify is not None or max_num_seqs is not None or limit is not None:
        raise commands.BadParameter(
            "--certificate, --verify, --limit and --max-num-seqs belong to --task: leave them out"
        )
    return _perplexity(given, text, model, window, max_tokens, as_json)


def _evaluate_task(
    given: dict[str, Any],  # of `LLM`
    model: str | None,
    task: str,
    limit: int | None,
    files: tuple[Path | None, Path | None],  # to write a certificate to, and to compare with
    max_num_seqs: int | None,
    as_json: bool,
) -> None:
    from bifolio.api.llm import LLM
    from bifolio.measure.evaluation import evaluate, read_certificate, read_task, verify

    path = Path(task)
    is_harness = path.suffix == ".yaml" or not path.exists()
    certify = _harness() if is_harness else None
    items = [] if is_harness else read_task(path)[:limit]
    expected = None if files[1] is None else read_certificate(files[1])
    with LLM(model, max_num_seqs=max_num_seqs, **given) as llm:
        llm.lora = options.SUM if given["lora_modules"] else None
        found = evaluate(llm, items, path.name) if certify is None else certify(llm, task, limit)
    if expected is not None:
        verify(found, expected)
    if files[0] is not None:
        files[0].write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if as_json:
        commands.echo(json.dumps({key: value for key, value in found.items() if key != "items"}))
        return
    score = found["score"]
    for name, value in score.get("metrics", {}).items():
        commands.echo(f"{name}: {value:.4f}")
    commands.echo(f"{score['correct']} of {found['task']['items']} are right ({score['accuracy']:.1%})")
    commands.echo(f"certificate {found['digest']}" + ("" if expected is None else ": verified"))


def _harness() -> Callable[[LLM, str, int | None], dict[str, Any]]:
    """The function that certifies tasks of lm-eval."""
    try:
        from bifolio.measure.lm_eval_model import certify
    except ModuleNotFoundError as error:
        raise commands.BadParameter(
            "the task is no file, and tasks of lm-eval need the package: pip install lm-eval, or pass a file"
        ) from error
    return certify


def _compare(first: Path, second: Path, as_json: bool) -> None:
    from dataclasses import asdict

    from bifolio.measure.evaluation import compare, read_certificate

    one, other = read_certificate(first), read_certificate(second)
    found = compare(one, other)
    if as_json:
        commands.echo(json.dumps(asdict(found)))
        return
    names = [f"{each['model']['name']} ({each['score']['accuracy']:.1%})" for each in (one, other)]
    commands.echo(f"{names[0]} and {names[1]}, {one['task']['items']} items of {one['task']['name']}")
    commands.echo(f"both right {found.both}, both wrong {found.neither}, another answer in {len(found.changed)}")
    commands.echo(f"right in the first alone {len(found.lost)}: {' '.join(found.lost)}".rstrip(": "))
    commands.echo(f"right in the second alone {len(found.won)}: {' '.join(found.won)}".rstrip(": "))
    commands.echo(f"p = {found.p_value:.3g} (exact test of McNemar)")


def _perplexity(
    given: dict[str, Any],  # of `LLM`
    text: Path,
    model: str | None,
    window: int | None,
    max_tokens: int | None,
    as_json: bool,
) -> None:
    from bifolio.api.llm import LLM
    from bifolio.cli.progress import steps_bar
    from bifolio.errors import ConfigError
    from bifolio.measure.perplexity import WINDOW, text_perplexity
    from bifolio.model.loader import load_model
    from bifolio.model.registry import DEFAULT_MODEL
    from bifolio.text.utf8 import read_text

    content = read_text(text)
    if window is not None and window < 2:
        raise ConfigError(f"--window needs at least 2 tokens, not {window}")
    loaded = load_model(model or DEFAULT_MODEL)
    most = loaded.config.max_position
    if window is not None and window > most:
        raise ConfigError(f"--window {window} is longer than the model's context of {most} tokens: pass at most {most}")
    length = window or min(WINDOW, most)
    llm = LLM(loaded, max_model_len=length, max_num_seqs=4, enable_prefix_caching=False, **given)
    llm.lora = options.SUM if given["lora_modules"] else None
    began = time.perf_counter()
    with steps_bar("scoring") as progress:
        result = text_perplexity(llm, content, window=length, max_tokens=max_tokens, progress=progress)
    seconds = time.perf_counter() - began
    record = {
        "model": str(loaded.path),
        "text": str(text),
        "perplexity": result.value,
        "loss": math.log(result.value),
        "tokens": result.num_tokens,
        "window": length,
        "seconds": round(seconds, 3),
    }
    if as_json:
        commands.echo(json.dumps(record))
    else:
        commands.echo(f"perplexity {result.value:.4f} (loss {record['loss']:.4f} per token)")
        commands.echo(f"{result.num_tokens} tokens in {seconds:.1f} s, {result.num_tokens / seconds:.0f} tokens/s")
