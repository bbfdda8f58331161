"""`/live`: the engine as it is, several times a second, for the page's map of blocks and slots.

    {"stats": {...}, "slots": [...], "waiting": [...], "blocks": base64 of u8[n, 2]}

Each block is two bytes: its state (0 free, 1 cached, 2 + slot held) and the number of rows that hold it.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import time
from collections import Counter
from typing import Any
from urllib.parse import parse_qs

import numpy as np

from bifolio.api.messages import BLOCK_COLOURS, BLOCK_HELD
from bifolio.errors import EngineFaultError
from bifolio.serve.http.auth import Receive, Scope, Send, Tenant
from bifolio.serve.http.context import ServerContext
from bifolio.serve.http.encoding import encode_json
from bifolio.serve.http.errors import ApiError, bad_request
from bifolio.serve.http.exchange import SSE_HEADERS

LOOK_TIMEOUT = 5.0  # seconds
MAX_WATCHERS = 32  # pictures cost the engine a little time each
MAX_WATCHERS_PER_KEY = 8
HIDDEN = ("prompt", "computed", "tokens", "generated", "limit", "cached", "preemptions")  # of requests of other keys
_watchers: Counter[str] = Counter()


async def live_events(context: ServerContext, scope: Scope, receive: Receive, send: Send) -> None:
    """Server-sent events until the client goes away."""
    interval = _interval(scope)
    tenant: Tenant = scope["state"]["tenant"]
    if _watchers.total() >= MAX_WATCHERS or _watchers[tenant.name] >= MAX_WATCHERS_PER_KEY:
        raise ApiError(
            429, "too many clients watch already: close another page first", "too_many_watchers", retry_after=10
        )
    _watchers[tenant.name] += 1
    gone = asyncio.create_task(_until_gone(receive))
    try:
        await send({"type": "http.response.start", "status": 200, "headers": SSE_HEADERS})
        while not gone.done() and not context.draining:
            event = b"data: " + encode_json(await picture(context, tenant)) + b"\n\n"
            async with asyncio.timeout(context.limits.write_timeout):
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await asyncio.wait([gone], timeout=interval)
        if not gone.done():
            await send({"type": "http.response.body", "body": b""})
    except TimeoutError:
        raise ApiError(499, "the client stopped reading", "slow_client") from None
    finally:
        _watchers[tenant.name] -= 1
        gone.cancel()


async def picture(context: ServerContext, tenant: Tenant) -> dict[str, Any]:
    """One event; without an engine there is little to see. Lengths are those of the tenant's own requests."""
    engine = context.engine
    seen: dict[str, Any] = {"time": time.time(), "ready": engine.health().is_ready, "stats": dict(engine.stats)}
    seen["restarts"] = engine.num_restarts
    seen["latency"] = _latencies(context)
    if engine.hello is not None:
        seen |= {"block_size": engine.hello.block_size, "max_num_seqs": engine.hello.max_num_seqs}
    with contextlib.suppress(EngineFaultError, TimeoutError):
        async with asyncio.timeout(LOOK_TIMEOUT):
            found = await engine.snapshot()
        slots = [visible_entry(entry, tenant) for entry in found.slots]
        own = {entry["slot"] for entry in slots if entry["id"]}
        seen |= {"slots": slots, "stats": found.stats}
        seen["waiting"] = [visible_entry(entry, tenant) for entry in found.waiting]
        seen["sessions"] = visible_sessions(found.sessions, tenant)
        seen["blocks"] = base64.b64encode(_visible_blocks(found.blocks, own)).decode()
    return seen


def visible_sessions(sessions: list[dict[str, Any]], tenant: Tenant) -> list[dict[str, Any]]:
    """The conversations of this client."""
    own = [entry for entry in sessions if entry["owner"] == tenant.share]
    return [{name: value for name, value in entry.items() if name != "owner"} for entry in own]


def visible_entry(entry: dict[str, Any], tenant: Tenant) -> dict[str, Any]:
    """The entry of a request, without its id and lengths if it belongs to another key."""
    owner = entry.pop("owner")
    if owner == tenant.name:
        return entry
    return {**entry, "id": "", **dict.fromkeys(HIDDEN, 0)}


def _visible_blocks(blocks: bytes, own_slots: set[int]) -> bytes:
    """u8[n, 2]: blocks of other keys are held, by no slot in particular."""
    states = np.frombuffer(blocks, np.uint8).reshape(-1, 2).copy()
    shown = np.isin(states[:, 0], [BLOCK_HELD + slot % BLOCK_COLOURS for slot in own_slots])
    states[(states[:, 0] > BLOCK_HELD) & ~shown, 0] = BLOCK_HELD
    return states.tobytes()


def _latencies(context: ServerContext) -> dict[str, float]:
    """Sums and counts since the start: the page makes averages of its own intervals."""
    values = {}
    for name, histogram in (("ttft", context.metrics.time_to_first_token), ("itl", context.metrics.inter_token)):
        for sample in next(iter(histogram.collect())).samples:
            if sample.name.endswith(("_sum", "_count")):
                values[name + sample.name[sample.name.rindex("_") :]] = sample.value
    return values


def _interval(scope: Scope) -> float:
    text = parse_qs(scope["query_string"].decode("latin-1")).get("interval", ["0.25"])[0]
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not 0.05 <= value <= 60:
        raise bad_request("interval is a number of seconds from 0.05 to 60", "interval")
    return value


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
