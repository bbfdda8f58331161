"""One engine for the calls of several threads: a lock, the results of open streams, and the engine's owner."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

from bifolio.api.stream import TokenStream
from bifolio.beam_params import BeamSearchParams
from bifolio.engine.adapters import LoadedAdapter
from bifolio.engine.engine import InferenceEngine
from bifolio.errors import ConfigError, EngineDeadError, RequestError
from bifolio.pooling_params import PoolingParams
from bifolio.prompts import PromptTokens
from bifolio.sampling_params import SamplingParams
from bifolio.sequence import Request, RequestOptions, StepResult
from bifolio.text.pairs import EncodedText

Start: TypeAlias = Callable[[InferenceEngine, str], Request | None]  # makes the request of an id, if one is needed
T = TypeVar("T")


class SharedEngine:
    """Calls from several threads run in one continuous batch: a thread holds the engine for one step at most."""

    def __init__(self, engine: InferenceEngine) -> None:
        self._engine: InferenceEngine | None = engine
        self._ids = itertools.count()
        self._lock = threading.RLock()
        self._streams: dict[str, list[StepResult]] = {}  # request id -> results that its stream has not read
        self._owner: str | None = None

    @property
    def engine(self) -> InferenceEngine:
        if self._engine is None:
            raise EngineDeadError("this LLM was closed: make a new one")
        return self._engine

    @property
    def is_closed(self) -> bool:
        return self._engine is None

    # -- requests ----------------------------------------------------------------------------------------------
    def add_all(
        self,
        prompts: Sequence[PromptTokens],
        params: Sequence[SamplingParams | BeamSearchParams],
        priorities: Sequence[int],
        adapters: Sequence[LoadedAdapter | None],
        results: list[StepResult] | None = None,
    ) -> list[Request]:
        """Add all requests or none: an invalid one raises before any request runs.

        Without a stream, the requests with the most tokens to generate are added first: they would end last, in steps
        of few sequences.
        """
        every = [
            (f"request-{next(self._ids)}", *each, results)
            for each in zip(prompts, params, priorities, adapters, strict=True)
        ]
        longest_first = sorted(range(len(every)), key=lambda place: -_most_tokens(params[place]))
        requests: dict[int, Request] = {}
        try:
            for place in longest_first if results is None else range(len(every)):
                requests[place] = self._add(*every[place])
        except BaseException:
            self.abort(list(requests.values()))
            raise
        return [requests[place] for place in range(len(every))]

    def add_pooled(
        self, texts: Sequence[EncodedText], params: PoolingParams, adapters: Sequence[LoadedAdapter | None]
    ) -> list[Request]:
        """Add requests for vectors or scores, all or none."""
        added: list[Request] = []
        with self._lock:
            self._check_ready()
            try:
                for text, adapter in zip(texts, adapters, strict=True):
                    name = f"request-{next(self._ids)}"
                    options: RequestOptions = {"second_start": text.second_start, "adapter": adapter}
                    added.append(self.engine.add_request(name, text.token_ids, params, **options))
            except BaseException:
                self.abort(added)
                raise
        return added

    def _add(
        self,
        request_id: str,
        prompt: PromptTokens,
        params: SamplingParams | BeamSearchParams,
        priority: int,
        adapter: LoadedAdapter | None,
        results: list[StepResult] | None,
    ) -> Request:
        options: RequestOptions = {
            "prompt": prompt.text, "images": prompt.images, "priority": priority, "adapter": adapter,
        }  # fmt: skip
        with self._lock:
            self._check_ready()
            request = self.engine.add_request(request_id, prompt.token_ids, params, **options)
            if results is not None:
                self._streams[request_id] = results
            return request

    def stream(
        self,
        prompts: Sequence[PromptTokens],
        params: Sequence[SamplingParams],
        adapters: Sequence[LoadedAdapter | None],
    ) -> TokenStream:
        """The results of new requests while the engine runs."""
        unread: list[StepResult] = []
        requests = self.add_all(prompts, params, [0] * len(prompts), adapters, unread)
        return TokenStream(requests, unread, self._lock, self.step, self.abort)

    def run(self, starts: Sequence[Start]) -> list[Request]:
        """Add the requests that these functions make, all or none, and run until they are finished."""
        requests: list[Request] = []
        with self._lock:
            self._check_ready()
            try:
                for start in starts:
                    request = start(self.engine, f"request-{next(self._ids)}")
                    requests += [] if request is None else [request]
            except BaseException:
                self.abort(requests)
                raise
        self.finish(requests, progress=False)
        return requests

    def locked(self, function: Callable[[], T]) -> T:
        """Call a function that reads or changes state of the engine."""
        with self._lock:
            self._check_owner()
            return function()

    def step(self) -> list[StepResult]:
        """One step for the requests of all threads; results of streams go to their readers."""
        with self._lock:
            self._check_owner()
            results = self.engine.step()
            for result in results:
                unread = self._streams.get(result.request_id)
                if unread is not None:
                    unread.append(result)
            return results

    def finish(self, requests: list[Request], progress: bool) -> None:
        """Run until these requests are finished; an interruption aborts them."""
        try:
            if not progress:
                while any(not request.is_finished for request in requests):
                    self.step()
            else:
                self._finish_with_bar(requests)
        finally:
            self.abort(requests)

    def _finish_with_bar(self, requests: list[Request]) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, TextColumn("{task.fields[speed]}"), console=Console(stderr=True)) as bar:
            task = bar.add_task("generating", total=len(requests), speed="")
            num_tokens = 0
            while any(not request.is_finished for request in requests):
                num_tokens += sum(result.token is not None for result in self.step())
                elapsed = bar.tasks[0].elapsed or 1e-9
                done = sum(request.is_finished for request in requests)
                bar.update(task, completed=done, speed=f"{num_tokens / elapsed:.0f} tok/s")

    def abort(self, requests: list[Request]) -> None:
        with self._lock:
            unfinished = [request for request in requests if not request.is_finished]
            for request in unfinished:
                self.engine.abort(request.request_id)
            if unfinished:
                self.step()  # releases their slots and blocks
            for request in requests:
                self._streams.pop(request.request_id, None)

    def close(self) -> None:
        if self._engine is None:
            return
        kernels = self._engine.runner.kernels
        self._engine.close()
        self._engine = None
        kernels.release_memory()  # of a GPU: to other engines and processes

    # -- another owner -----------------------------------------------------------------------------------------
    def hand_over(self, owner: str) -> None:
        """Let another object run the engine on its own thread; calls are refused from now on."""
        with self._lock:
            self._check_owner()
            if self.engine.has_work:
                raise ConfigError(f"requests are running in this LLM: wait for them before {owner} takes it over")
            self._owner = owner

    def take_back(self) -> None:
        """Accept calls again, after the other owner has stopped its thread."""
        with self._lock:
            self._owner = None

    def _check_ready(self) -> None:
        self._check_owner()
        if self.engine.asleep:
            raise RequestError("this LLM sleeps: call wake_up() before other calls")

    def _check_owner(self) -> None:
        if self._owner is not None:
            raise ConfigError(f"{self._owner} runs the engine of this LLM: use its methods instead, or close it first")


def _most_tokens(params: SamplingParams | BeamSearchParams) -> float:
    return math.inf if params.max_tokens is None else params.max_tokens
