"""The state that all handlers of the front end share."""

from __future__ import annotations

import contextlib
import heapq
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from bifolio.api.client import EngineClient
from bifolio.model.loaded import TextModel
from bifolio.model.vision.pictures import Pictures
from bifolio.serve.helpers.grammar_checks import GrammarChecks
from bifolio.serve.helpers.helper import Helper, new_helper
from bifolio.serve.http.auth import Tenant
from bifolio.serve.http.errors import ApiError, queue_full
from bifolio.serve.http.receipt_files import ReceiptFiles
from bifolio.serve.http.sampling import EngineParams
from bifolio.serve.http.token_text import TokenTexts
from bifolio.serve.http.tokenizing import TokenizerPool
from bifolio.serve.views.metrics import Metrics

if TYPE_CHECKING:
    from bifolio.serve.helpers.branches import Branches


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on the requests of one client and of all clients together."""

    max_body_bytes: int = 4 << 20
    image_hosts: tuple[str, ...] = ()  # whose images requests may name by http(s) URLs
    max_queue: int = 256  # requests that may wait for a slot
    reserved_per_key: int = 16  # requests of a key, or address, that are admitted even if others have filled the queue
    max_open_per_key: int | None = None  # requests in flight of one key, or address without keys; None: no such limit
    request_timeout: float = 600.0  # seconds, from the arrival to the last token
    body_timeout: float = 30.0  # seconds that a client may take to send its request
    write_timeout: float = 60.0  # seconds that a client may take to read an event
    max_prompts: int = 256  # in one request
    max_sequences: int = 256  # prompts × completions of one request
    max_scored: int = 1_000_000  # logprobs that one request may ask for, those of its prompts included


@dataclass(slots=True)
class ServerContext:
    """The model's tokenizer and template, the engine, limits and metrics."""

    model: TextModel
    engine: EngineClient
    name: str  # as clients see the model
    limits: Limits = field(default_factory=Limits)
    metrics: Metrics = field(default_factory=Metrics)
    created: int = field(default_factory=lambda: int(time.time()))
    log_prompts: bool = False
    reference: str | None = None  # the model, as helper processes find it; None: by its path
    mmproj: str | None = None  # the file of its tower; None: beside the model, or none
    allow_pull: bool = False  # clients may fetch models into the cache
    allow_updates: bool = False  # clients may pause the engine and give it other weights
    allow_priority: bool = False  # priorities of clients without keys count
    receipts: ReceiptFiles | None = None  # of all answers
    draining: bool = False
    branches: Branches | None = None  # further front ends
    gather: Callable[[Metrics], Awaitable[bytes]] | None = None  # asks the first front end for the metrics of all
    texts: TokenTexts = field(init=False)
    tokenizers: TokenizerPool = field(init=False)
    templates: Helper = field(init=False)  # renders chat templates
    grammars: GrammarChecks = field(init=False)
    pictures: Pictures | None = field(init=False)  # None: the model reads text only
    _open_per_share: Counter[str] = field(init=False, default_factory=Counter)
    _free_places: list[int] = field(init=False, default_factory=list)  # a heap
    _num_places: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.texts = TokenTexts(self.model.tokenizer)
        self.tokenizers = TokenizerPool(self.model.tokenizer)
        model = self.reference or str(self.model.path)
        self.templates = new_helper(model, reads_tokenizer=False, mmproj=self.mmproj)
        self.pictures = None if self.model.vision is None else Pictures(self.model.vision)
        self.grammars = GrammarChecks(new_helper(model, reads_tokenizer=True))
        if self.gather is None:  # else the first front end reports the engine
            self.metrics.watch(self.engine)

    async def close(self) -> None:
        """End the helper processes and the threads of the tokenizer; write the last receipts."""
        if self.receipts is not None:
            self.receipts.close()
        self.tokenizers.close()
        await self.templates.close()
        await self.grammars.close()

    def begin_drain(self) -> None:
        """Refuse new requests, in all front ends; requests in flight finish."""
        self.draining = True
        if self.branches is not None:
            self.branches.begin_drain()

    async def render_metrics(self) -> bytes:
        """The metrics of all front ends together."""
        if self.gather is not None:
            return await self.gather(self.metrics)
        return self.metrics.render([] if self.branches is None else self.branches.samples())

    @contextlib.contextmanager
    def admission(self, tenant: Tenant, count: int) -> Iterator[None]:
        """Admit `count` engine requests, or refuse with the seconds to wait. An early refusal keeps the queue short."""
        if self.draining:
            raise ApiError(
                503,
                "the server is shutting down: send the request again in 5 s, or to another server",
                "shutting_down",
                retry_after=5,
            )
        if self.engine.hello is None:
            raise ApiError(503, "the engine is starting: ask again in a moment", "engine_unavailable", retry_after=2)
        error = self.refusal(tenant.share, count)
        if error is not None:
            raise error
        self._open_per_share[tenant.share] += count
        try:
            yield
        finally:
            self._open_per_share[tenant.share] -= count
            if not self._open_per_share[tenant.share]:
                del self._open_per_share[tenant.share]

    def take_place(self) -> int:
        """The smallest number that no other request without a key has: later requests follow in its turns."""
        if self._free_places:
            return heapq.heappop(self._free_places)
        self._num_places += 1
        return self._num_places - 1

    def give_back_place(self, place: int) -> None:
        heapq.heappush(self._free_places, place)

    def refusal(self, share: str, count: int) -> ApiError | None:
        """The error of `count` further requests, if they are too many; requests of all front ends count."""
        engine, limits = self.engine, self.limits
        elsewhere = 0 if self.branches is None else self.branches.open_per_share(share)
        own, all_open = count + self._open_per_share[share] + elsewhere, engine.num_open + count
        is_alone = own >= all_open  # no other client has filled the queue
        is_full = engine.hello is not None and all_open > engine.hello.max_num_seqs + limits.max_queue
        if is_full and (own > limits.reserved_per_key or is_alone or not share):
            return queue_full(engine.num_open, self._wait())
        most = limits.max_open_per_key
        if most is None or own <= most:
            return None
        message = f"this key has {most} requests in flight, the most allowed: wait for one"
        return ApiError(429, message, "key_limit", retry_after=1)

    def _wait(self) -> int:
        """Seconds until the queue has probably moved on by one batch."""
        return max(1, min(60, math.ceil(self.metrics.recent_latency)))

    @property
    def max_model_len(self) -> int:
        """Tokens of a prompt and its completion together."""
        hello = self.engine.hello
        return self.model.config.max_position if hello is None else hello.max_model_len

    def check_scored(self, prompts: Sequence[list[int]], num_drawn: int, params: EngineParams) -> None:
        """Refuse a request whose logprobs would take hundreds of megabytes."""
        values = params.values
        limit = values.get("max_tokens")
        each = self.max_model_len if limit is None else min(limit, self.max_model_len)
        scored = 0
        if values.get("logprobs") is not None:
            scored += len(prompts) * num_drawn * each * (1 + values["logprobs"])
        if values.get("prompt_logprobs") is not None:
            scored += sum(map(len, prompts)) * (1 + values["prompt_logprobs"])
        if scored > self.limits.max_scored:
            raise ApiError(
                400,
                f"the request may return {scored} logprobs and {self.limits.max_scored} are allowed: ask for fewer "
                "prompts, tokens or logprobs",
                "too_many_logprobs",
                param="logprobs",
            )

    def check_model(self, wanted: str | None) -> None:
        """Refuse a name that is neither the model's nor that of an adapter."""
        self.adapters_of(wanted)

    def adapters_of(self, wanted: str | None) -> list[tuple[str, float]]:
        """The adapters, with factors, of a request to a model: the model's name and none stand for the base."""
        if wanted is None or wanted in ("", self.name):
            return []
        known, hello = [each.name for each in self.engine.adapters], self.engine.hello
        if wanted in known or (hello is not None and hello.loads_adapters):
            return [(wanted, 1.0)]
        names, one = ", ".join(map(repr, [self.name, *known])), "one" if known else "this name"
        raise ApiError(
            404,
            f"the model {wanted!r} does not exist; this server has {names}: pass {one}, or none",
            "model_not_found",
            param="model",
        )

    def adapters_for(self, wanted: str | None) -> list[tuple[str, float]]:
        """The adapters, with factors, of a request to a model; the base has those that `POST /lora-adapters` scales."""
        return self.adapters_of(wanted) or self.scaled_adapters()

    def scaled_adapters(self) -> list[tuple[str, float]]:
        """The adapters, with factors, of requests that name none (`POST /lora-adapters`)."""
        return [(each.name, each.scale) for each in self.engine.adapters if each.scale]


def public_name(reference: str | Path | None, given: str | None) -> str:
    """The model's name in the API: `given`, or the name of its file or folder."""
    from bifolio.model.registry import DEFAULT_MODEL

    return given or Path(str(reference or DEFAULT_MODEL)).stem or "model"
