"""A picture of the engine at one moment: who sits in which slot, who waits, and the state of every block."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from bifolio.api import messages as m
from bifolio.engine.engine import InferenceEngine
from bifolio.sequence import Sequence

FREE, CACHED, HELD = 0, 1, m.BLOCK_HELD
COLOURS = m.BLOCK_COLOURS
MAX_WAITING = 100  # listed; the others are counted
MAX_SESSIONS = 200  # listed, the newest


def slots_of(engine: InferenceEngine) -> list[dict[str, Any]]:
    """One entry for every slot that is taken."""
    return [_entry(slot.held) | {"slot": slot.index} for slot in engine.batcher.active_slots()]


def waiting_of(engine: InferenceEngine) -> list[dict[str, Any]]:
    running = {id(slot.sequence) for slot in engine.batcher.active_slots()}
    entries = []
    for request in engine.requests.values():
        lead = next((s for s in request.sequences if s.finish_reason is None), None)
        if lead is not None and id(lead) not in running:
            entries.append(_entry(lead))
        if len(entries) >= MAX_WAITING:
            break
    return entries


def _entry(sequence: Sequence) -> dict[str, Any]:
    request = sequence.request
    return {
        "id": request.request_id,
        "index": sequence.index,
        "phase": sequence.phase.value,
        "prompt": sequence.num_prompt,
        "computed": sequence.num_computed,
        "tokens": sequence.num_tokens,
        "generated": len(sequence.output_token_ids),
        "limit": request.max_tokens,
        "cached": request.metrics.num_cached_tokens,
        "preemptions": request.metrics.num_preemptions,
        "drafted": sequence.num_drafted,
        "accepted": sequence.num_accepted,
        "beams": 0 if request.search is None else len(request.search.members),
    }


def sessions_of(engine: InferenceEngine) -> list[dict[str, Any]]:
    """The conversations that clients named: warm (in the cache), disk (the rest is in a tier) or gone."""
    size, tiers, now = engine.blocks.block_size, engine.tiers, time.monotonic()
    found = []
    for session, num_cached in engine.blocks.sessions()[:MAX_SESSIONS]:
        count = len(session.digests)
        in_tier = 0 if tiers is None or num_cached == count else sum(map(tiers.has, session.digests))
        state = "warm" if num_cached == count else "disk" if tiers is not None and in_tier == count else "gone"
        left = None if session.hint.pin else max(session.expires - now, 0.0)
        entry = {"session_id": session.hint.name, "owner": session.owner, "state": state, "tokens": session.num_tokens}
        entry |= {"cached": num_cached * size, "protected": session.num_protected * size}
        found.append({**entry, "ttl": left, "pin": session.hint.pin})
    return found


def blocks_of(engine: InferenceEngine) -> bytes:
    """u8[num_blocks - 1, 2]: state and number of holders of each block but the padding block.

    A shared block has the colour of the first slot that holds it.
    """
    manager = engine.blocks
    state = np.zeros(manager.num_blocks, dtype=np.uint8)
    holders = np.zeros(manager.num_blocks, dtype=np.uint8)
    with manager.lock:
        for page in manager.pages():
            holders[page.block_id] = min(page.ref_count, 255)
            state[page.block_id] = HELD if page.ref_count else CACHED  # held without a slot: kept conversations
        for slot in reversed(engine.batcher.active_slots()):
            if manager.has_table(slot.held.id):
                state[manager.block_ids_of(slot.held.id)] = HELD + slot.index % COLOURS
    return np.stack([state, holders], axis=1)[1:].tobytes()
