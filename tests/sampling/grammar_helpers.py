"""The engine that the tests of structured output share."""

from __future__ import annotations

from functools import cache
from typing import Any

from bifolio.api.llm import LLM
from helpers import tiny_loaded


@cache
def llm(**options: Any) -> LLM:
    settings = {"num_blocks": 1024, "block_size": 8, "max_model_len": 256, "max_num_seqs": 32, "chunk_size": 64}
    return LLM(tiny_loaded(tokenizer=True), **{**settings, **options})
