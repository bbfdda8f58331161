"""The messages between the first front end, which owns the engine, and the others.

Requests and updates travel as they do to the engine (`api.messages`); the messages of this file concern the front ends.
"""

from __future__ import annotations

import msgspec

from bifolio.api.messages import (
    Abort,
    Beat,
    BranchCall,
    BranchReply,
    Control,
    Controlled,
    Embed,
    Embedding,
    Hello,
    Look,
    Picture,
    Recall,
    Recalled,
    Refused,
    Remember,
    Start,
    Stop,
    Updates,
)


class Serve(msgspec.Struct, tag="serve"):
    """First message to a new front end: its settings, encoded by `serve.helpers.branches`."""

    settings: bytes
    secret: bytes  # digests of API keys are equal in all front ends
    id_prefix: str  # of its requests: the first front end finds the owner of an update by it


class Lost(msgspec.Struct, tag="lost"):
    """The engine process ended, and all requests with it."""


class Drain(msgspec.Struct, tag="drain"):
    """Refuse new requests; exit when those in flight have ended."""


class Samples(msgspec.Struct, tag="samples"):
    """The metrics of a front end, as Prometheus reads them."""

    body: bytes


class Scrape(msgspec.Struct, tag="scrape"):
    """Ask for the metrics of all front ends."""

    id: str


class Scraped(msgspec.Struct, tag="scraped"):
    id: str
    body: bytes


FromBranch = Start | Abort | Stop | Embed | Look | Remember | Recall | BranchCall | Control | Samples | Scrape
ToBranch = (
    Serve | Hello | Refused | Updates | Embedding | Picture | Recalled | BranchReply | Controlled
    | Beat | Lost | Drain | Scraped
)  # fmt: skip

from_branch_decoder = msgspec.msgpack.Decoder(FromBranch)
to_branch_decoder = msgspec.msgpack.Decoder(ToBranch)
