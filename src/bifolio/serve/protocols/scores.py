"""Scores over HTTP: rerankers and classifiers, and the calls of text-embeddings-inference.

/v1/rerank, /v2/rerank, /rerank    Jina's and Cohere's form with `documents`; with `texts` that of TEI
/score, /v1/score                  pairs, as vLLM
/classify, /pooling                labels and vectors of tokens, as vLLM
/embed, /predict                   TEI
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from bifolio.api.messages import Pooling
from bifolio.api.pooled_texts import PooledTexts, paired
from bifolio.config import HeadConfig
from bifolio.serve.http.auth import Receive, Scope, Send
from bifolio.serve.http.context import ServerContext
from bifolio.serve.http.errors import bad_request
from bifolio.serve.http.exchange import decode, read_body, send_json
from bifolio.serve.protocols import pooling_types as t
from bifolio.serve.protocols.common import RouteRow
from bifolio.serve.protocols.embeddings import encoded, pooled, shown, vector_size
from bifolio.text.pairs import EncodedText

Scored = tuple[list[float], int]  # scores, and the number of tokens


async def score_pairs(
    context: ServerContext,
    pairs: Sequence[tuple[str, str]],
    truncate: int | None,
    activate: bool | None,
    scope: Scope,
    receive: Receive,
    model: str | None,
) -> Scored:
    """The score of each pair; of a model that makes vectors the cosine of the two."""
    check_count(context, len(pairs))
    head = context.model.pooling.head
    if head is None:
        return await _products(context, pairs, truncate, activate is not False, scope, receive, model)
    texts = await encoded_pairs(context, pairs, truncate)
    raw = await pooled(context, texts, Pooling("score", use_activation=activate), scope, receive, model)
    return [float(_floats(each)[head.score or 0]) for each in raw], _count(texts)


async def _products(
    context: ServerContext,
    pairs: Sequence[tuple[str, str]],
    truncate: int | None,
    normalize: bool,
    scope: Scope,
    receive: Receive,
    model: str | None,
) -> Scored:
    """The products of the vectors of pairs: their cosines, if they are normalised."""
    plain = list(dict.fromkeys(text for pair in pairs for text in pair))
    texts = await encoded(context, plain, truncate)
    raw = await pooled(context, texts, Pooling("embed", use_activation=normalize), scope, receive, model)
    vectors = {text: _floats(each).astype(np.float64) for text, each in zip(plain, raw, strict=True)}
    return [float(vectors[one] @ vectors[other]) for one, other in pairs], _count(texts)


async def encoded_pairs(
    context: ServerContext, pairs: Sequence[tuple[str, str]], truncate: int | None
) -> list[EncodedText]:
    texts = PooledTexts(context.model, context.max_model_len)
    size = sum(len(text) for pair in pairs for text in pair)
    if truncate is None:
        for text in {text for pair in pairs for text in pair}:
            context.tokenizers.check_fits(text, context.max_model_len)
    found: list[EncodedText] = await context.tokenizers.run(lambda: texts.encode_pairs(pairs, truncate), size)
    return found


async def rerank(context: ServerContext, scope: Scope, receive: Receive, send: Send) -> None:
    request = decode(await read_body(scope, receive, context.limits), t.RerankRequest)
    context.check_model(request.model)
    if (request.documents is None) == (request.texts is None):
        raise bad_request("/rerank needs documents, or texts in the form of TEI: pass one of them", "documents")
    given = request.texts or request.documents or []
    documents = [text if isinstance(text, str) else text.text for text in given]
    truncate = -1 if request.truncate else request.truncate_prompt_tokens
    own = documents
    if request.max_tokens_per_doc is not None:
        own = await _cut(context, documents, request.max_tokens_per_doc)
    activate = False if request.raw_scores else request.use_activation
    pairs = [(request.query, text) for text in own]
    scores, count = await score_pairs(context, pairs, truncate, activate, scope, receive, request.model)
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: request.top_n]
    if request.texts is not None:
        texts = {index: {"text": documents[index]} if request.return_text else {} for index in order}
        await send_json(send, [{"index": index, "score": scores[index], **texts[index]} for index in order])
        return
    results = [
        {"index": index, "relevance_score": scores[index]}
        | ({"document": {"text": documents[index]}} if request.return_documents else {})
        for index in order
    ]
    usage = {"prompt_tokens": count, "total_tokens": count}
    meta = {"billed_units": {"search_units": 1}, "tokens": {"input_tokens": count}}
    answer = {"id": context.engine.new_id(), "model": context.name, "results": results, "usage": usage, "meta": meta}
    await send_json(send, answer)


async def _cut(context: ServerContext, documents: Sequence[str], most: int) -> list[str]:
    """The beginnings of documents, each of a limited number of tokens."""
    tokenizer = context.tokenizers.tokenizer

    def work() -> list[str]:
        found = tokenizer.encode_batch(documents, add_special_tokens=False)
        return [
            text if len(ids) <= most else tokenizer.decode(ids[:most])
            for text, ids in zip(documents, found, strict=True)
        ]

    cut: list[str] = await context.tokenizers.run(work, sum(map(len, documents)))
    return cut


async def score(context: ServerContext, scope: Scope, receive: Receive, send: Send) -> None:
    request = decode(await read_body(scope, receive, context.limits), t.ScoreRequest)
    context.check_model(request.model)
    pairs = paired(request.text_1, request.text_2)
    truncate, activate = request.truncate_prompt_tokens, request.use_activation
    scores, count = await score_pairs(context, pairs, truncate, activate, scope, receive, request.model)
    data = [{"index": index, "object": "score", "score": value} for index, value in enumerate(scores)]
    await send_json(send, _list(context, data, count))


async def classify(context: ServerContext, scope: Scope, receive: Receive, send: Send) -> None:
    request = decode(await read_body(scope, receive, context.limits), t.ClassifyRequest)
    context.check_model(request.model)
    head = _head(context)
    texts = await encoded(context, request.input, request.truncate_prompt_tokens)
    raw = await pooled(
        context, texts, Pooling("classify", use_activation=request.use_activation), scope, receive, request.model
    )
    data = []
    for index, scores in enumerate(map(_floats, raw)):
        label = head.labels[int(scores.argmax())]
        probs = scores.astype(float).tolist()
        data.append({"index": index, "label": label, "probs": probs, "num_classes": len(probs)})
    await send_json(send, _list(context, data, _count(texts)))


async def pooling(context: ServerContext, scope: Scope, receive: Receive, send: Send) -> None:
    request = decode(await read_body(scope, receive, context.limits), t.PoolingRequest)
    context.check_model(request.model)
    texts = await encoded(context, request.input, request.truncate_prompt_tokens)
    wanted = Pooling(request.task, request.dimensions, request.use_activation)
    raw = await pooled(context, texts, wanted, scope, receive, request.model)
    width = request.dimensions or vector_size(context)

    def value(each: bytes) -> Any:
        if request.encoding_format == "base64" or request.task != "token_embed":
            return shown(each, request.encoding_format)
        return _floats(each).reshape(-1, width).astype(float).tolist()

    data = [{"index": index, "object": "pooling", "data": value(each)} for index, each in enumerate(raw)]
    await send_json(send, _list(context, data, _count(texts)))


async def embed(context: ServerContext, scope: Scope, receive: Receive, send: Send) -> None:
    request = decode(await read_body(scope, receive, context.limits), t.EmbedInputs)
    texts = await encoded(context, request.inputs, -1 if request.truncate else None, request.prompt_name, "inputs")
    raw = await pooled(context, texts, Pooling("embed", request.dimensions, request.normalize), scope, receive)
    await send_json(send, [shown(each, "float") for each in raw])


async def predict(context: ServerContext, scope: Scope, receive: Receive, send: Send) -> None:
    request = decode(await read_body(scope, receive, context.limits), t.PredictInputs)
    head, given = _head(context), request.inputs
    is_batch = isinstance(given, list) and all(isinstance(item, list) for item in given)
    items: list[Any] = list(given) if is_batch else [[given] if isinstance(given, str) else given]
    check_count(context, len(items))
    if any(len(item) not in (1, 2) or not all(isinstance(text, str) for text in item) for item in items):
        raise bad_request("inputs must be a text, a pair [text, text], or a list of [text] and pairs", "inputs")
    truncate = -1 if request.truncate else None
    texts = []
    for item in items:
        own = await (
            encoded_pairs(context, [tuple(item)], truncate) if len(item) == 2 else encoded(context, item, truncate)
        )
        texts += own
        await asyncio.sleep(0)
    activate = False if request.raw_scores else None
    raw = await pooled(context, texts, Pooling("classify", use_activation=activate), scope, receive)
    found = []
    for scores in map(_floats, raw):
        order = np.argsort(-scores, kind="stable").tolist()
        found.append([{"score": float(scores[i]), "label": head.labels[i]} for i in order])
    await send_json(send, found if is_batch else found[0])


def check_count(context: ServerContext, count: int) -> None:
    most = context.limits.max_prompts
    if count > most:
        raise bad_request(f"{count} texts are too many: send at most {most} in a request")


def _head(context: ServerContext) -> HeadConfig:
    head = context.model.pooling.head
    if head is None:
        raise bad_request("this model has no classifier: ask it for vectors (/v1/embeddings)")
    return head


def _floats(raw: bytes) -> np.ndarray:
    return np.frombuffer(raw, dtype="<f4")


def _count(texts: Sequence[EncodedText]) -> int:
    return sum(len(text.token_ids) for text in texts)


def _list(context: ServerContext, data: list[dict[str, Any]], count: int) -> dict[str, Any]:
    usage = {"prompt_tokens": count, "total_tokens": count, "completion_tokens": 0}
    named = {"id": context.engine.new_id(), "object": "list", "created": int(time.time()), "model": context.name}
    return {**named, "data": data, "usage": usage}


ROUTES: tuple[RouteRow, ...] = (
    *((path, "POST", rerank) for path in ("/v1/rerank", "/v2/rerank", "/rerank")),
    *((path, "POST", score) for path in ("/v1/score", "/score")),
    ("/classify", "POST", classify),
    ("/pooling", "POST", pooling),
    ("/embed", "POST", embed),
    ("/predict", "POST", predict),
)
