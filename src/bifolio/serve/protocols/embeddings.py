"""Vectors and scores over HTTP: OpenAI's `/v1/embeddings`."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from bifolio.api.messages import Pooling
from bifolio.api.pooled_texts import PooledTexts
from bifolio.serve.http.auth import Receive, Scope, Send
from bifolio.serve.http.context import ServerContext
from bifolio.serve.http.errors import bad_request
from bifolio.serve.http.exchange import decode, read_body, send_json
from bifolio.serve.http.running import tenant_of, unless_gone
from bifolio.serve.protocols import openai_answers as r
from bifolio.serve.protocols import openai_types as p
from bifolio.serve.protocols.common import RouteRow
from bifolio.text.pairs import EncodedText


async def pooled(
    context: ServerContext,
    texts: Sequence[EncodedText],
    pooling: Pooling,
    scope: Scope,
    receive: Receive,
    model: str | None = None,
) -> list[bytes]:
    """The results of all texts of a request to a model or an adapter, as bytes of f32."""
    tenant, adapters = tenant_of(scope), context.adapters_for(model)
    own = msgspec.structs.replace(pooling, key=tenant.name, share=tenant.share, salt=tenant.salt, adapters=adapters)
    with context.admission(tenant, len(texts)):
        work = asyncio.gather(
            *(
                context.engine.embed(text.token_ids, msgspec.structs.replace(own, second_start=text.second_start))
                for text in texts
            )
        )
        found: list[bytes] = await unless_gone(work, receive, context.limits.request_timeout)
    return found


async def encoded(
    context: ServerContext,
    inputs: Any,
    truncate: int | None = None,
    prompt_name: str | None = None,
    name: str = "input",
) -> list[EncodedText]:
    """The tokens of a text, of token ids, or of a list of either."""
    texts = PooledTexts(context.model, context.max_model_len)
    prefix = texts.prompt(prompt_name)
    parts = as_parts(context, inputs, name)
    size = sum(len(part) for part in parts if isinstance(part, str))
    if truncate is None:
        for part in parts:
            if isinstance(part, str):
                context.tokenizers.check_fits(part, context.max_model_len)
    result: list[EncodedText] = await context.tokenizers.run(lambda: texts.encode(parts, truncate, prefix), size)
    return result


def as_parts(context: ServerContext, inputs: Any, name: str) -> list[str | list[int]]:
    """Texts or lists of token ids, as many as a request may have."""
    if isinstance(inputs, list) and inputs and all(isinstance(item, int) for item in inputs):
        inputs = [inputs]
    parts: list[str | list[int]] = [inputs] if isinstance(inputs, str) else inputs
    most = context.limits.max_prompts
    if not parts or any(not part for part in parts if isinstance(part, list)):
        raise bad_request(f"{name} is empty: pass at least one text", name)
    if len(parts) > most:
        raise bad_request(f"{len(parts)} texts are too many: send at most {most} in a request", name)
    if not (all(isinstance(part, str) for part in parts) or all(isinstance(part, list) for part in parts)):
        raise bad_request(f"{name} must be a text, a list of texts, token ids, or a list of lists of them", name)
    return parts


def vector_size(context: ServerContext) -> int:
    return context.model.pooling.size or context.model.config.hidden_size


def shown(raw: bytes, encoding: str) -> list[float] | str:
    if encoding == "base64":
        return base64.b64encode(raw).decode()
    values: list[float] = np.frombuffer(raw, dtype="<f4").astype(float).tolist()
    return values


async def embeddings(context: ServerContext, scope: Scope, receive: Receive, send: Send) -> None:
    request = decode(await read_body(scope, receive, context.limits), p.EmbeddingRequest)
    context.check_model(request.model)
    inputs = await encoded(context, request.input, request.truncate_prompt_tokens, request.prompt_name)
    raw = await pooled(
        context, inputs, Pooling("embed", request.dimensions, request.normalize), scope, receive, request.model
    )
    data = [r.EmbeddingItem(index, shown(each, request.encoding_format)) for index, each in enumerate(raw)]
    count = sum(len(text.token_ids) for text in inputs)
    await send_json(send, r.EmbeddingList(data, request.model or context.name, r.EmbeddingUsage(count, count)))


ROUTES: tuple[RouteRow, ...] = (("/v1/embeddings", "POST", embeddings),)
