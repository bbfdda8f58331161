"""`LLM` for asyncio: the engine runs on its own thread, and calls are awaited."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from bifolio.api.branch import AsyncBranch
from bifolio.api.chat_tokenizer import ChatTokenizer
from bifolio.api.engine_args import EngineArgs
from bifolio.api.generation import Generation, GrowingOutput
from bifolio.api.llm import LLM
from bifolio.api.lora import LoRA
from bifolio.api.outputs import RequestOutput, request_output
from bifolio.api.prompts import Prompt, as_prompts, beam_params
from bifolio.api.shared_engine import Start
from bifolio.beam_params import BeamSearchParams
from bifolio.engine.engine import InferenceEngine
from bifolio.engine.requests import as_token_ids
from bifolio.engine.sleep import checked_tags, fall_asleep, wake
from bifolio.engine.stats import EngineStats
from bifolio.engine.thread import EngineThread
from bifolio.errors import ConfigError, EngineDeadError, RequestError
from bifolio.model.loaded import LoadedModel
from bifolio.sampling_params import RequestOutputKind, SamplingParams
from bifolio.sequence import Request, StepResult
from bifolio.text.chat_template import Message

T = TypeVar("T")


class _Channel:
    """The result queue of one call, on the event loop of the caller."""

    __slots__ = ("_loop", "results")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.results: asyncio.Queue[StepResult | None] = asyncio.Queue()

    def put(self, items: list[StepResult | None]) -> None:
        """Called on the engine's thread; None means that the engine has stopped."""
        with contextlib.suppress(RuntimeError):  # the event loop is closed: no reader is left
            self._loop.call_soon_threadsafe(self._put, items)

    def _put(self, items: list[StepResult | None]) -> None:
        for item in items:
            self.results.put_nowait(item)


class AsyncLLM:
    """`LLM` for asyncio. Cancelling a call aborts its requests before the next step.

    Accepts the arguments of `LLM`. Calls from any number of tasks run in one continuous batch. Use it as
    `async with AsyncLLM(model) as llm`, or call `close`.
    """

    def __init__(self, model: str | Path | LoadedModel | LLM | None = None, **options: Any) -> None:
        if isinstance(model, LLM) and options:
            raise ConfigError(f"the LLM has its options already: pass {', '.join(options)} to LLM(...)")
        self.llm = model if isinstance(model, LLM) else LLM(model, **options)
        self.llm.hand_over("AsyncLLM")
        self._channels: dict[str, _Channel] = {}  # by request id; changed on the engine's thread only
        self._ids = itertools.count()
        self.thread = EngineThread(self.llm.engine, self._dispatch, self._notify_stopped)
        self.thread.start()

    # -- generating --------------------------------------------------------------------------------------------------
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        request_id: str | None = None,
        *,
        prompt: Prompt | None = None,
        priority: int = 0,
        lora_request: LoRA = None,
    ) -> Generation:
        """Complete every prompt.

        `await llm.generate(prompts, params)` gives the outputs in the order of the prompts. `async for output in
        llm.generate(prompt, params, request_id)` gives the output of one prompt again and again while it grows, as
        vLLM does; `SamplingParams.output_kind` chooses between everything so far, the new part, and the end alone.
        """
        if prompts is not None and prompt is not None:
            raise RequestError("prompt is another name of prompts: pass one of them")
        wanted: Any = prompts if prompt is None else prompt
        return Generation(
            lambda: self._finished(wanted, sampling_params, priority, request_id, lora_request),
            lambda: self._growing(wanted, sampling_params, priority, request_id, lora_request),
        )

    async def open(self, prompt: Prompt, *, lora_request: LoRA = None) -> AsyncBranch:
        """Compute a prompt and hold it as an `AsyncBranch`, as `LLM.open` does."""
        tokens = await asyncio.to_thread(self.llm.prompt_tokens, prompt)
        [adapter] = await asyncio.to_thread(self.llm.adapters_for, lora_request, 1)
        ids = as_token_ids(tokens.token_ids)
        state = await self.with_engine(lambda: self.llm.branches.open(ids, images=tokens.images, adapter=adapter))
        return await AsyncBranch(self, state).compute()

    async def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams | Sequence[BeamSearchParams] | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRA = None,
    ) -> list[RequestOutput]:
        """Run a beam search for every prompt, as `LLM.beam_search` does."""
        batch = as_prompts(prompts)
        return await self._ended(*await self._add(batch, beam_params(params, len(batch)), 0, request_id, lora_request))

    async def run_requests(self, starts: Sequence[Start]) -> list[Request]:
        """Run the requests that these functions make, all or none, until they are finished."""
        ids = [f"async-{next(self._ids)}" for _ in starts]
        made = zip(ids, starts, strict=True)
        requests, channel = await self._added(ids, lambda engine: (start(engine, one) for one, start in made))
        try:
            while any(not request.is_finished for request in requests):
                await self._next(channel)
            return requests
        finally:
            self._forget(requests)

    async def sleep(self, level: int = 1) -> None:
        """Give memory back until `wake_up`, as `LLM.sleep` does; requests wait."""

        def sleep(engine: InferenceEngine) -> None:
            fall_asleep(engine, level)
            self.thread.is_paused = True

        await asyncio.wrap_future(self.thread.call(sleep))

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Go on, as `LLM.wake_up` does."""
        checked_tags(tags)
        weights = await asyncio.to_thread(self.llm.awake_weights, tags)

        def awake(engine: InferenceEngine) -> None:
            wake(engine, tags, weights)
            self.thread.is_paused = bool(engine.asleep)

        await asyncio.wrap_future(self.thread.call(awake))

    async def is_sleeping(self) -> bool:
        """Whether memory was given back and not all of it is in use again."""
        return await self.with_engine(lambda: bool(self.llm.engine.asleep))

    async def with_engine(self, function: Callable[[], T]) -> T:
        """Call a function between two steps."""
        return await asyncio.wrap_future(self.thread.call(lambda engine: function()))

    async def _finished(
        self, prompts: Any, params: Any, priority: int, request_id: str | None, lora_request: LoRA
    ) -> list[RequestOutput]:
        return await self._ended(*await self._start(prompts, params, priority, request_id, lora_request))

    async def _ended(self, requests: list[Request], channel: _Channel) -> list[RequestOutput]:
        try:
            while any(not request.is_finished for request in requests):
                await self._next(channel)
            return [request_output(request, self.llm.decode_token) for request in requests]
        finally:
            self._forget(requests)

    async def _growing(
        self, prompts: Any, params: Any, priority: int, request_id: str | None, lora_request: LoRA
    ) -> AsyncIterator[RequestOutput]:
        requests, channel = await self._start(prompts, params, priority, request_id, lora_request)
        growing = {request.request_id: GrowingOutput(request, self.llm.decode_token) for request in requests}
        open_ends = sum(len(request.sequences) for request in requests)
        try:
            while open_ends:
                result = await self._next(channel)
                open_ends -= result.finished
                output = growing[result.request_id].add(result)
                if output.finished or growing[result.request_id].kind is not RequestOutputKind.FINAL_ONLY:
                    yield output
        finally:
            self._forget(requests)

    async def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
        lora_request: LoRA = None,
    ) -> AsyncIterator[tuple[int, StepResult]]:
        """Yield (index of the prompt, `StepResult`) after every step. Leaving the loop aborts the requests."""
        requests, channel = await self._start(prompts, sampling_params, priority, None, lora_request)
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
        lora_request: LoRA = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, rendered with the model's chat template."""
        conversations: Any = [messages] if not messages or isinstance(messages[0], Mapping) else messages
        prompts: list[Prompt] = [
            await asyncio.to_thread(self.llm.chat_prompt, conversation, tools=tools) for conversation in conversations
        ]
        return await self.generate(prompts, sampling_params, lora_request=lora_request)

    # -- state --------------------------------------------------------------------------------------------------------
    def default_params(self, **explicit: Any) -> SamplingParams:
        return self.llm.default_params(**explicit)

    async def stats(self) -> EngineStats:
        return await asyncio.wrap_future(self.thread.call(lambda engine: engine.stats()))

    async def close(self) -> None:
        """Abort running requests and end the thread."""
        await asyncio.to_thread(self.thread.stop)
        self.llm.take_back()

    def shutdown(self) -> None:
        """`close` for code that is not asynchronous."""
        self.thread.stop()

    async def abort(self, request_id: str) -> None:
        """End a request by its id."""
        await asyncio.wrap_future(self.thread.call(lambda engine: engine.abort(request_id)))

    def get_tokenizer(self) -> ChatTokenizer:
        return self.llm.get_tokenizer()

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> AsyncLLM:
        return cls(engine_args.model, **engine_args.options)

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
        request_id: str | None,
        lora_request: LoRA,
    ) -> tuple[list[Request], _Channel]:
        batch = as_prompts(prompts)
        return await self._add(batch, self.llm.params_for(batch, params), priority, request_id, lora_request)

    async def _add(
        self,
        batch: list[Prompt],
        each: Sequence[SamplingParams | BeamSearchParams],
        priority: int,
        request_id: str | None,
        lora_request: LoRA,
    ) -> tuple[list[Request], _Channel]:
        """Add all requests or none, like `LLM.generate`: an invalid prompt raises before any request runs."""
        inputs, each = await asyncio.to_thread(lambda: self.llm.resolved(batch, each))
        adapters = await asyncio.to_thread(self.llm.adapters_for, lora_request, len(batch))
        ids = [f"async-{next(self._ids)}" for _ in batch]
        if request_id is not None:
            ids = [request_id if not number else f"{request_id}-{number}" for number in range(len(batch))]
        every = list(zip(ids, inputs, each, adapters, strict=True))
        return await self._added(
            ids,
            lambda engine: (
                engine.add_request(
                    new_id, own.token_ids, one, prompt=own.text, images=own.images, priority=priority, adapter=adapter
                )
                for new_id, own, one, adapter in every
            ),
        )

    async def _added(
        self, ids: list[str], make: Callable[[InferenceEngine], Iterable[Request | None]]
    ) -> tuple[list[Request], _Channel]:
        """The requests that `make` adds between two steps, all or none."""
        channel = _Channel()

        def add(engine: InferenceEngine) -> list[Request]:
            requests: list[Request] = []
            try:
                for request in make(engine):
                    if request is not None:
                        requests.append(request)
                        self._channels[request.request_id] = channel
            except BaseException:
                self._end(engine, requests)
                raise
            return requests

        future = self.thread.call(add)
        try:
            return await asyncio.wrap_future(future), channel
        except asyncio.CancelledError:
            future.cancel()  # `add` may have run already: abort its requests
            self.thread.post(lambda engine: self._end_ids(engine, ids))
            raise

    async def _next(self, channel: _Channel) -> StepResult:
        result = await channel.results.get()
        if result is None:
            raise EngineDeadError("the engine stopped while the request ran: create a new engine and retry")
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
        """Deliver the results of a step, called on the engine's thread: one wake-up per waiting call."""
        grouped: dict[_Channel, list[StepResult | None]] = {}
        for result in results:
            channel = self._channels.get(result.request_id)
            if channel is not None:
                grouped.setdefault(channel, []).append(result)
        for channel, items in grouped.items():
            channel.put(items)

    def _notify_stopped(self) -> None:
        for channel in set(self._channels.values()):
            channel.put([None])


AsyncLLMEngine = AsyncLLM  # its older name in vLLM
