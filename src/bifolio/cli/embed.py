"""`bifolio embed`: vectors of texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from bifolio.cli import commands, options
from bifolio.cli.output_files import output_file

if TYPE_CHECKING:
    import numpy as np

HELP = """Compute the vectors of texts.

FILE has a text on each line, or JSON lines with a "text" each (.jsonl); - reads standard input. Vectors are written to
a .npy file, f32[texts, size], or printed as JSON lines. Models that make vectors are encoders such as all-MiniLM and
bge, and embedding models such as Qwen3-Embedding; other models average their hidden states."""
EPILOG = """Examples:

  bifolio embed texts.txt --model ./all-MiniLM-L6-v2 --output vectors.npy

  bifolio embed questions.jsonl -m ./bge-small --prompt-name query --dimensions 256 --output questions.npy"""


def register(app: commands.App) -> None:
    app.command(help=HELP, epilog=EPILOG)(embed)


def embed(
    numerics: options.Numerics,
    file: Annotated[str, commands.argument(help="A file with a text on each line, a .jsonl file, or -.")],
    model: options.Model = None,
    lora: options.Lora = None,
    output: Annotated[
        Path | None,
        commands.option("--output", "-o", help="The .npy file of the vectors.", read=output_file),
    ] = None,
    dimensions: Annotated[
        int | None, commands.option("--dimensions", min=1, help="Keep the first values of each vector.")
    ] = None,
    prompt_name: Annotated[
        str | None, commands.option("--prompt-name", help="A prompt of the model, put before each text.")
    ] = None,
    truncate: Annotated[
        bool, commands.option("--truncate", help="Cut texts that are too long, which are refused otherwise.")
    ] = False,
    raw: Annotated[bool, commands.option("--raw", help="Leave vectors as long as they are.")] = False,
) -> None:
    from bifolio.api.llm import LLM
    from bifolio.cli.text_lines import read_texts
    from bifolio.model.registry import DEFAULT_MODEL
    from bifolio.pooling_params import PoolingParams

    if output is not None and output.suffix != ".npy":
        raise commands.BadParameter(f"--output {output}: name a .npy file")
    texts = read_texts(file)
    params = PoolingParams(dimensions, False if raw else None)
    adapters = options.sum_of_adapters(lora)
    with LLM(model or DEFAULT_MODEL, lora_modules=adapters, **numerics.for_llm()) as llm:
        llm.lora = options.SUM if adapters else None
        found = llm.embed(
            texts, pooling_params=params, prompt_name=prompt_name, truncate_prompt_tokens=-1 if truncate else None
        )
    vectors = [result.outputs.data for result in found]
    if output is None:
        for index, vector in enumerate(vectors):
            commands.echo(json.dumps({"index": index, "embedding": vector.astype(float).tolist()}))
        return
    _write(output, vectors)
    commands.echo(f"{len(vectors)} vectors of {len(vectors[0])} values: {output}", err=True)


def _write(path: Path, vectors: list[np.ndarray]) -> None:
    import numpy as np

    from bifolio.errors import ConfigError

    try:
        with path.open("wb") as file:
            np.save(file, np.stack(vectors), allow_pickle=False)
    except OSError as error:
        raise ConfigError(f"--output {path} cannot be written: {error.strerror}") from error
