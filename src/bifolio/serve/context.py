"""The state that all handlers of the front end share."""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from bifolio.model.text_model import TextModel
from bifolio.serve.auth import Tenant
from bifolio.serve.errors import ApiError
from bifolio.serve.metrics import Metrics
from bifolio.serve.supervisor import EngineProcess
from bifolio.serve.token_text import TokenTexts


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on the requests of one client and of all clients together."""

    max_body_bytes: int = 4 << 20
    max_queue: int = 256  # requests that may wait for a slot
    max_open_per_key: int | None = None  # requests that one key may have under way; None: no limit of its own
    request_timeout: float = 600.0  # seconds, from the arrival to the last token
    body_timeout: float = 30.0  # seconds that a client may take to send its request
    write_timeout: float = 60.0  # seconds that a client may take to read an event
    max_prompts: int = 256  # in one request
    max_sequences: int = 256  # prompts × completions of one request


@dataclass(slots=True)
class ServerContext:
    """The model's tokenizer and template, the engine, limits and metrics."""

    model: TextModel
    engine: EngineProcess
    name: str  # as clients see the model
    limits: Limits = field(default_factory=Limits)
    metrics: Metrics = field(default_factory=Metrics)
    created: int = field(default_factory=lambda: int(time.time()))
    log_prompts: bool = False
    draining: bool = False
    texts: TokenTexts = field(init=False)
    _open_per_key: Counter[str] = field(init=False, default_factory=Counter)

    _longest_token: int | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.texts = TokenTexts(self.model.tokenizer)
        self.metrics.watch(self.engine)

    @contextlib.contextmanager
    def admission(self, tenant: Tenant, count: int) -> Iterator[None]:
        """Admit `count` engine requests, or refuse with the seconds to wait. An early refusal keeps the queue short."""
        engine, limits = self.engine, self.limits
        if self.draining:
            raise ApiError(503, "the server is shutting down", "shutting_down", retry_after=5)
        if engine.hello is None:
            raise ApiError(503, "the engine is starting: ask again in a moment", "engine_unavailable", retry_after=2)
        if engine.num_open + count > engine.hello.max_num_seqs + limits.max_queue:
            raise ApiError(
                429,
                f"{engine.num_open} requests are under way: come back later",
                "queue_full",
                retry_after=self._wait(),
            )
        most = limits.max_open_per_key
        if most is not None and self._open_per_key[tenant.name] + count > most:
            raise ApiError(429, f"this key may have {most} requests under way at a time", "key_limit", retry_after=1)
        self._open_per_key[tenant.name] += count
        try:
            yield
        finally:
            self._open_per_key[tenant.name] -= count
            if not self._open_per_key[tenant.name]:
                del self._open_per_key[tenant.name]

    def _wait(self) -> int:
        """Seconds until the queue has probably moved on by one batch."""
        return max(1, min(60, math.ceil(self.metrics.recent_latency)))

    def check_length(self, text: str) -> None:
        """Refuse at once a text that cannot fit however it is cut into tokens: encoding megabytes takes seconds."""
        tokenizer, hello = self.model.tokenizer, self.engine.hello
        if tokenizer is None or hello is None:
            return
        if self._longest_token is None:
            self._longest_token = max(map(len, tokenizer.backend.get_vocab()), default=1)
        if len(text) > hello.max_model_len * self._longest_token:
            raise ApiError(
                400,
                f"the text has {len(text)} characters and the model takes {hello.max_model_len} tokens: shorten it",
                "context_length_exceeded",
                param="prompt",
            )

    def check_model(self, wanted: str | None) -> None:
        if wanted is not None and wanted not in ("", self.name):
            raise ApiError(
                404,
                f"the model {wanted!r} does not exist; this server has {self.name!r}",
                "model_not_found",
                param="model",
            )


def public_name(reference: str | Path | None, given: str | None) -> str:
    """The model's name in the API: `given`, or the name of its file or folder."""
    from bifolio.model.registry import DEFAULT_MODEL

    return given or Path(str(reference or DEFAULT_MODEL)).stem or "model"
