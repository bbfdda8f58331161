"""Texts as a model for vectors and scores takes them: with its prompts, as single texts or as pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bifolio.api.images import given_images
from bifolio.api.prompts import suffix_of
from bifolio.errors import RequestError, did_you_mean
from bifolio.images import VECTORS_OF_TEXT
from bifolio.model.loaded import TextModel
from bifolio.pooling_params import check_truncation
from bifolio.prompts import PromptTokens
from bifolio.text.pairs import EncodedText, encode_pairs, encode_prompts, encode_texts


class PooledTexts:
    """Encodes the texts of requests for vectors and scores."""

    def __init__(self, model: TextModel, max_model_len: int) -> None:
        self._model = model
        self._longest = max_model_len

    def prompt(self, name: str | None) -> str:
        """The text that is put before each text; by default that of the model's files."""
        pooling = self._model.pooling
        name = pooling.default_prompt if name is None else name
        if name is None:
            return ""
        if name not in pooling.prompts:
            known = ", ".join(pooling.prompts) or "none"
            hint = did_you_mean(name, pooling.prompts)
            raise RequestError(f"the model has no prompt {name!r}{hint or ': it has ' + known}")
        return pooling.prompts[name]

    def encode(self, texts: Sequence[Any], truncate: int | None, prefix: str = "") -> list[EncodedText]:
        """The tokens of texts, or of lists of token ids, which stay as they are."""
        tokens = [_token_ids(text) for text in texts]
        plain = [self._prepared(text, prefix) for text, ids in zip(texts, tokens, strict=True) if ids is None]
        encoded = iter(encode_texts(self._model.require_tokenizer(), plain, self.limit(truncate)) if plain else [])
        return [next(encoded) if ids is None else EncodedText(self._cut(ids, truncate)) for ids in tokens]

    def encode_pairs(self, pairs: Sequence[tuple[str, str]], truncate: int | None) -> list[EncodedText]:
        tokenizer = self._model.require_tokenizer()
        prepared = [(self._prepared(one, ""), self._prepared(other, "")) for one, other in pairs]
        template = self._model.pair_template
        if template is not None:
            return encode_prompts(tokenizer, template, prepared, self.limit(truncate))
        found = encode_pairs(tokenizer, prepared, self.limit(truncate))
        has_types = self._model.config.token_types > 1
        return found if has_types else [EncodedText(text.token_ids) for text in found]

    def limit(self, truncate: int | None) -> int | None:
        """The most tokens of a text that is cut; None: texts are not cut."""
        check_truncation(truncate)
        if truncate is None:
            return None
        return self._longest if truncate == -1 else min(truncate, self._longest)

    def _cut(self, ids: list[int], truncate: int | None) -> list[int]:
        return ids if truncate is None else ids[: self.limit(truncate)]

    def _prepared(self, text: Any, prefix: str) -> str:
        if isinstance(text, Mapping):
            text = text.get("prompt")
        if not isinstance(text, str):
            raise RequestError(f"a text to embed is a text or a list of token ids, not {type(text).__name__}")
        return prefix + (text.lower() if self._model.pooling.lowercase else text)


def paired(data_1: str | Sequence[str], data_2: str | Sequence[str]) -> list[tuple[str, str]]:
    """Pairs of one query and each document, or of two lists of equal length."""
    queries, documents = ([data] if isinstance(data, str) else list(data) for data in (data_1, data_2))
    for text in (*queries, *documents):
        if not isinstance(text, str):
            raise RequestError(f"score takes texts, not {text!r}")
    if len(queries) == 1:
        queries = queries * len(documents)
    if len(queries) != len(documents):
        raise RequestError(
            f"{len(queries)} first texts and {len(documents)} second ones: pass one first text, or as many of both"
        )
    return list(zip(queries, documents, strict=True))


def _token_ids(text: Any) -> list[int] | None:
    """The token ids of a prompt that has them; None: it is text."""
    if isinstance(text, PromptTokens):
        if text.images:
            raise RequestError(VECTORS_OF_TEXT)
        return list(text.token_ids)
    if suffix_of(text) is not None:
        raise RequestError("a text to embed has no suffix: leave it out")
    if isinstance(text, Mapping):
        if given_images(text):
            raise RequestError(VECTORS_OF_TEXT)
        text = text.get("prompt_token_ids")
    return None if text is None or isinstance(text, str) else list(text)
