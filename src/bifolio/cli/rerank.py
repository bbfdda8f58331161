"""`bifolio rerank`: texts in the order of their relevance to a query."""

from __future__ import annotations

import json
from typing import Annotated

from bifolio.cli import commands, options

HELP = """Sort texts by their relevance to a query.

FILE has a text on each line, or JSON lines with a "text" each (.jsonl); - reads standard input. A reranker reads query
and text together; of a model that makes vectors the score is their cosine. Lines are the score, a tab and the text."""
EPILOG = """Examples:

  bifolio rerank "How do plants eat?" passages.txt --model ./bge-reranker-base

  bifolio rerank "capital of France" passages.jsonl -m ./all-MiniLM-L6-v2 --top-n 3 --json"""


def register(app: commands.App) -> None:
    app.command(help=HELP, epilog=EPILOG)(rerank)


def rerank(
    numerics: options.Numerics,
    query: Annotated[str, commands.argument(help="The query.")],
    file: Annotated[str, commands.argument(help="A file with a text on each line, a .jsonl file, or -.")],
    model: options.Model = None,
    lora: options.Lora = None,
    top_n: Annotated[
        int | None, commands.option("--top-n", min=1, help="Number of texts to print, the best first.")
    ] = None,
    truncate: Annotated[
        bool, commands.option("--truncate", help="Cut texts that are too long, which are refused otherwise.")
    ] = False,
    as_json: Annotated[bool, commands.option("--json", help="Print JSON lines with index, score and text.")] = False,
) -> None:
    from bifolio.api.llm import LLM
    from bifolio.cli.text_lines import read_texts
    from bifolio.model.registry import DEFAULT_MODEL

    texts = read_texts(file)
    adapters = options.sum_of_adapters(lora)
    with LLM(model or DEFAULT_MODEL, lora_modules=adapters, **numerics.for_llm()) as llm:
        llm.lora = options.SUM if adapters else None
        found = llm.score(query, texts, truncate_prompt_tokens=-1 if truncate else None)
    scored = sorted(((result.outputs.score, index) for index, result in enumerate(found)), key=lambda each: -each[0])
    for score, index in scored[:top_n]:
        if as_json:
            commands.echo(json.dumps({"index": index, "score": score, "text": texts[index]}, ensure_ascii=False))
        else:
            commands.echo(f"{score:.6f}\t{texts[index]}")
