"""Requests for vectors and scores, in the engine's process: each has one result and no stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from bifolio.api import messages as m
from bifolio.engine.adapters import LoadedAdapter
from bifolio.engine.engine import InferenceEngine
from bifolio.pooling_params import PoolingParams
from bifolio.sequence import Request, RequestOptions


class PooledRequests:
    """The requests in flight, by id; all methods run on the engine's thread."""

    def __init__(self, send: Callable[[m.FromEngine], None]) -> None:
        self._send = send
        self._requests: dict[str, Request] = {}

    def start(self, engine: InferenceEngine, message: m.Embed, adapter: LoadedAdapter | None, turn: float) -> None:
        asked = message.pooling
        options: RequestOptions = {
            "turn": turn, "owner": asked.share, "salt": asked.salt, "second_start": asked.second_start,
            "adapter": adapter,
        }  # fmt: skip
        params = PoolingParams(asked.dimensions, asked.use_activation, task=asked.task)
        self._requests[message.id] = engine.add_request(message.id, message.token_ids, params, **options)

    def forget(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def ended(self, request_ids: Iterable[str]) -> list[float]:
        """Send the results of those that are for vectors or scores; their turns."""
        found = [self._requests.pop(each) for each in request_ids if each in self._requests]
        for request in found:
            if request.fault is not None:
                self._send(m.Refused(request.request_id, request.fault, request.error or ""))
            elif request.pooling.value is not None:
                value = request.pooling.value.astype("<f4", copy=False)
                self._send(m.Embedding(request.request_id, value.tobytes()))
        return [request.turn for request in found]
