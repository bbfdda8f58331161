"""Requests for scores and vectors beside OpenAI's: rerankers, classifiers, and text-embeddings-inference."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from bifolio.serve.protocols.openai_types import BIG, Ignored, Name, Prompts, Strict, Text

Texts = Annotated[list[Text], Meta(min_length=1, max_length=4096)]
Truncation = Annotated[int, Meta(ge=-1, le=BIG)]
Top = Annotated[int, Meta(ge=1, le=BIG)]


class RerankDocument(Strict, kw_only=True):
    text: Text


class RerankRequest(Strict, kw_only=True):
    """The form of Jina and Cohere, with `documents`, or that of text-embeddings-inference, with `texts`."""

    query: Text
    documents: Annotated[list[Text | RerankDocument], Meta(min_length=1, max_length=4096)] | None = None
    texts: Texts | None = None
    model: Name | None = None
    top_n: Top | None = None
    return_documents: bool = False
    return_text: bool = False
    raw_scores: bool = False
    truncate: bool = False
    truncate_prompt_tokens: Truncation | None = None
    max_tokens_per_doc: Top | None = None
    use_activation: bool | None = None
    user: Name | None = None


class ScoreRequest(Strict, kw_only=True):
    text_1: Text | Texts
    text_2: Text | Texts
    model: Name | None = None
    truncate_prompt_tokens: Truncation | None = None
    use_activation: bool | None = None
    user: Name | None = None


class ClassifyRequest(Strict, kw_only=True):
    input: Prompts
    model: Name | None = None
    truncate_prompt_tokens: Truncation | None = None
    use_activation: bool | None = None
    user: Name | None = None


class PoolingRequest(Strict, kw_only=True):
    input: Prompts
    model: Name | None = None
    task: Literal["embed", "token_embed", "classify"] = "token_embed"
    dimensions: Top | None = None
    encoding_format: Literal["float", "base64"] = "float"
    truncate_prompt_tokens: Truncation | None = None
    use_activation: bool | None = None
    user: Name | None = None


class EmbedInputs(Strict, kw_only=True):
    """`/embed` of text-embeddings-inference."""

    inputs: Prompts
    normalize: bool = True
    truncate: bool = False
    prompt_name: Name | None = None
    dimensions: Top | None = None


class PredictInputs(Strict, kw_only=True):
    """`/predict` of text-embeddings-inference: a text, a pair, or a list of either in lists."""

    inputs: Text | Annotated[list[Text | Texts], Meta(min_length=1, max_length=4096)]
    raw_scores: bool = False
    truncate: bool = False


NO_ACCOUNTS = "the server keeps no accounts of users"
IGNORED: Ignored = {
    RerankRequest: {"user": NO_ACCOUNTS},
    ScoreRequest: {"user": NO_ACCOUNTS},
    ClassifyRequest: {"user": NO_ACCOUNTS},
    PoolingRequest: {"user": NO_ACCOUNTS},
}
