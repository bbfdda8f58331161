"""Decoders that were trained as rerankers and whose folders say so by their name alone.

Such a folder is that of a model for text: neither `modules.json` nor the class in config.json tells it apart. It is
known by the name of the folder, or by the headline of its README.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from bifolio.text.pairs import PairTemplate

README_BYTES = 1 << 16  # that are searched for a headline
CACHE_DEPTH = 3  # folders of a download whose names may be that of the model


class NamedReranker(NamedTuple):
    """The prompt of a reranker, and the two answers whose logits are compared."""

    template: PairTemplate
    negative: str
    positive: str


RERANKERS = {
    "qwen3-reranker": NamedReranker(
        PairTemplate(
            "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
            'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
            "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n<Query>: ",
            "\n<Document>: ",
            "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
        ),
        "no",
        "yes",
    )
}


def named_reranker(folder: Path) -> NamedReranker | None:
    """The reranker that the folder's name or its README.md names."""
    names = [part.lower() for part in folder.resolve().parts[-CACHE_DEPTH:]] + [_headline(folder / "README.md")]
    return next((own for name, own in RERANKERS.items() if any(name in found for found in names)), None)


def _headline(readme: Path) -> str:
    if not readme.is_file():
        return ""
    with readme.open(encoding="utf-8", errors="replace") as file:
        lines = file.read(README_BYTES).splitlines()
    return next((line.lower() for line in lines if line.startswith("# ")), "")
