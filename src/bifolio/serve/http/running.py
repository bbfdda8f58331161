"""Running a prepared call: admission, the engine request, its answer as a whole or in events, and its log."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol, runtime_checkable

from bifolio.serve.http.auth import Receive, Scope, Send, Tenant
from bifolio.serve.http.context import ServerContext
from bifolio.serve.http.errors import ApiError
from bifolio.serve.http.events import Event
from bifolio.serve.http.exchange import OPENAI_EVENTS, Framing, send_events, send_json
from bifolio.serve.http.generation import Job, Run
from bifolio.serve.http.transfer_fields import asked_address, transfer_params
from bifolio.serve.http.whole_answers import Whole, collect
from bifolio.serve.protocols.openai_answers import ChatCompletion, Completion, Usage

logger = logging.getLogger("bifolio.http")


class Call(Protocol):
    """A request of any protocol, and the shapes of its answer."""

    @property
    def job(self) -> Job: ...

    def whole(self, whole: Whole, usage: Usage) -> Any:
        """The whole answer."""

    def events(self, run: Run) -> AsyncIterator[list[Event]]:
        """The answer in pieces, all that are ready at a time."""


@runtime_checkable
class NamedCall(Protocol):
    """A call whose answer has an id."""

    id: str


async def run_call(
    context: ServerContext, call: Call, scope: Scope, receive: Receive, send: Send, framing: Framing = OPENAI_EVENTS
) -> None:
    """Run a call and send its answer."""
    job = call.job
    job.prefill_at = asked_address(scope["headers"], job.transfer_params)
    if context.log_prompts:
        logger.info("prompt", extra={"prompt_token_ids": job.prompts, "prompt": _texts(context, job.prompts)})
    with context.admission(job.tenant, len(job.prompts)):
        run = Run(context, job)
        watcher = asyncio.create_task(run.watch(receive))
        try:
            run.start()
            if job.stream:
                await send_events(send, call.events(run), context.limits.write_timeout, job.write_interval, framing)
            else:
                answer = call.whole(await collect(run), run.usage())
                host = (scope.get("server") or ("127.0.0.1", 0))[0]
                blocks = transfer_params(context.engine.hello, host, job.transfer_params)
                if blocks is not None and isinstance(answer, Completion | ChatCompletion):
                    answer.kv_transfer_params = blocks
                if job.wants_receipt and run.receipts and isinstance(answer, Completion | ChatCompletion):
                    [answer.receipt] = run.receipts
                await send_json(send, answer)
        finally:
            run.close()
            watcher.cancel()
            if context.receipts is not None:
                context.receipts.put(call.id if isinstance(call, NamedCall) else job.request_id, run.receipts)
            usage = run.usage()
            scope["state"]["usage"] = {
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": usage.completion_tokens,
                "cached_tokens": usage.prompt_tokens_details.cached_tokens,
                "stream": job.stream,
            }


async def unless_gone(work: asyncio.Future[Any], receive: Receive, timeout: float) -> Any:
    """Wait for work that is dropped when the client goes away or time is up."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    watcher = asyncio.ensure_future(gone())
    work.add_done_callback(lambda done: done.cancelled() or done.exception())  # read also if the client has gone
    try:
        await asyncio.wait([work, watcher], timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        if watcher.done():
            raise ApiError(499, "the client has gone", "client_closed")
        raise ApiError(504, f"the request took longer than {timeout:g} s, its time limit: shorten it", "timeout")
    finally:
        watcher.cancel()
        work.cancel()


def tenant_of(scope: Scope) -> Tenant:
    tenant: Tenant = scope["state"]["tenant"]
    return tenant


def _texts(context: ServerContext, prompts: Sequence[list[int]]) -> list[str]:
    tokenizer = context.model.tokenizer
    return [] if tokenizer is None else [tokenizer.decode(tokens, skip_special_tokens=False) for tokens in prompts]
