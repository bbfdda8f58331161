"""`bifolio eval`: how well a model predicts a text."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Annotated

from bifolio.cli import commands, options

HELP = """Measure the perplexity of a model on a text file.

The text is cut into windows that do not overlap; every token but the first of a window is predicted from the
tokens before it in the window. Lower is better: exp of the mean loss per token."""
EPILOG = """Examples:

  bifolio eval story.txt

  bifolio eval wiki.txt.xz --model ./SmolLM2-135M --window 2048 --json"""


def register(app: commands.App) -> None:
    app.command("eval", help=HELP, epilog=EPILOG)(evaluate)


def evaluate(
    numerics: options.Numerics,
    text: Annotated[Path, commands.argument(help="A text file, plain or .xz.")],
    model: options.Model = None,
    window: Annotated[
        int | None, commands.option("--window", help="Length of a window in tokens; default: 512.")
    ] = None,
    max_tokens: Annotated[
        int | None, commands.option("--max-tokens", "-n", help="Number of tokens to score; default: all.")
    ] = None,
    as_json: Annotated[bool, commands.option("--json", help="Print one JSON object.")] = False,
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
    llm = LLM(loaded, max_model_len=length, max_num_seqs=4, enable_prefix_caching=False, **numerics.for_llm())
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
