"""The asyncio twin of `LLM`: the same engine on a thread of its own, awaited instead of called."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from bifolio.api.llm import LLM, Prompt, as_prompts
from bifolio.api.outputs import RequestOutput, request_output
from bifolio.engine.engine import EngineStats, InferenceEngine
from bifolio.engine.thread import EngineThread
from bifolio.errors import EngineDeadError
from bifolio.model.loaded import LoadedModel
from bifolio.sampling_params import SamplingParams
from bifolio.sequence import Request, StepResult
from bifolio.text.chat_template import Message


class _Channel:
    """Where the results of one call go: a queue of the event loop that made it."""

    __slots__ = ("_loop", "results")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.results: asyncio.Queue[StepResult | None] = asyncio.Queue()

    def put(self, items: list[StepResult | None]) -> None:
        """From the engine's thread; None says that the engine is gone."""
        with contextlib.suppress(RuntimeError):  # the event loop was closed: nobody listens any more
            self._loop.call_soon_threadsafe(self._put, items)

    def _put(self, items: list[StepResult | None]) -> None:
        for item in items:
            self.results.put_nowait(item)


class AsyncLLM:
    """`LLM` for asyncio. Cancelling a call ends its requests before the next step.

    Takes the arguments of `LLM`. Calls from any number of tasks run in one continuous batch. Use it as
    `async with AsyncLLM(model) as llm`, or call `close`.
    """

    def __init__(self, model: str | Path | LoadedModel | LLM | None = None, **options: Any) -> None:
        self.llm = model if isinstance(model, LLM) else LLM(model, **options)
        self.llm.hand_over("AsyncLLM")
        self._channels: dict[str, _Channel] = {}  # request id → who waits for it; changed on the engine's thread
        self._ids = itertools.count()
        self.thread = EngineThread(self.llm.engine, self._dispatch, self._tell_dead)
        self.thread.start()

    # -- generating --------------------------------------------------------------------------------------------------
    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
    ) -> list[RequestOutput]:
        """Complete every prompt; the results come in the order of the prompts."""
        requests, channel = await self._start(prompts, sampling_params, priority)
        try:
            while any(not request.is_finished for request in requests):
                await self._next(channel)
            return [request_output(request) for request in requests]
        finally:
            self._forget(requests)

    async def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
    ) -> AsyncIterator[tuple[int, StepResult]]:
        """(index of the prompt, what a step did for it), as it happens. Leaving the loop ends the requests."""
        requests, channel = await self._start(prompts, sampling_params, priority)
        number = {request.request_id: index for index, request in enumerate(requests)}
        open_ends = sum(len(request.sequences) for request in requests)
        try:
            while open_ends:
                result = await self._next(channel)
                open_ends -= result.finished
                yield number[result.request_id], result
        finally:
            self._forget(requests)

    async def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, written with the model's own chat template."""
        conversations: Any = [messages] if not messages or isinstance(messages[0], Mapping) else messages
        prompts: list[Prompt] = []
        for conversation in conversations:
            tokens = await asyncio.to_thread(self.llm.chat_tokens, conversation, tools=tools)
            prompts.append({"prompt_token_ids": tokens})
        return await self.generate(prompts, sampling_params)

    # -- looking, and the end -----------------------------------------------------------------------------------------
    def default_params(self, **explicit: Any) -> SamplingParams:
        return self.llm.default_params(**explicit)

    async def stats(self) -> EngineStats:
        return await asyncio.wrap_future(self.thread.call(lambda engine: engine.stats()))

    async def close(self) -> None:
        """Abort what runs and end the thread."""
        await asyncio.to_thread(self.thread.stop)
        self.llm.take_back()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # -- details ------------------------------------------------------------------------------------------------------
    async def _start(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int,
    ) -> tuple[list[Request], _Channel]:
        """All or nothing, like `LLM.generate`: a bad prompt refuses the call."""
        batch = as_prompts(prompts)
        each = self.llm.params_for(batch, params)
        inputs = await asyncio.to_thread(lambda: [self.llm.prompt_tokens(prompt) for prompt in batch])
        ids = [f"async-{next(self._ids)}" for _ in batch]
        channel = _Channel()

        def add(engine: InferenceEngine) -> list[Request]:
            requests: list[Request] = []
            try:
                for request_id, (text, tokens), one in zip(ids, inputs, each, strict=True):
                    requests.append(engine.add_request(request_id, tokens, one, prompt=text, priority=priority))
                    self._channels[request_id] = channel
            except BaseException:
                self._end(engine, requests)
                raise
            return requests

        future = self.thread.call(add)
        try:
            return await asyncio.wrap_future(future), channel
        except asyncio.CancelledError:
            future.cancel()  # if it has begun already, what it added is ended:
            self.thread.post(lambda engine: self._end_ids(engine, ids))
            raise

    async def _next(self, channel: _Channel) -> StepResult:
        result = await channel.results.get()
        if result is None:
            raise EngineDeadError("the engine stopped while the request ran: start a new one and ask again")
        return result

    def _forget(self, requests: list[Request]) -> None:
        ids = [request.request_id for request in requests]
        if self.thread.is_alive:
            self.thread.post(lambda engine: self._end_ids(engine, ids))

    def _end(self, engine: InferenceEngine, requests: list[Request]) -> None:
        self._end_ids(engine, [request.request_id for request in requests])

    def _end_ids(self, engine: InferenceEngine, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._channels.pop(request_id, None)
            engine.abort(request_id)

    def _dispatch(self, results: list[StepResult]) -> None:
        """On the engine's thread: wake each waiting call once per step, whatever it got."""
        grouped: dict[_Channel, list[StepResult | None]] = {}
        for result in results:
            channel = self._channels.get(result.request_id)
            if channel is not None:
                grouped.setdefault(channel, []).append(result)
        for channel, items in grouped.items():
            channel.put(items)

    def _tell_dead(self) -> None:
        for channel in set(self._channels.values()):
            channel.put([None])
