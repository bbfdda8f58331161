"""Hints of a client about a conversation: its blocks are evicted last for a while, or until it is released."""

from __future__ import annotations

from typing import NamedTuple

SESSION_SECONDS = 300.0  # without a time of its own


class SessionHint(NamedTuple):
    """The conversation that a request belongs to."""

    name: str  # `session_id`, of one client
    seconds: float = SESSION_SECONDS  # `ttl`: after the last request its blocks are evicted last for this time
    pin: bool = False  # until it is released; saved when the server ends
