"""The messages between an engine client and an engine, and their frames on a connection.

Frames of four bytes of length and one msgpack message, over a private pair of connected sockets or, after both ends
have proved that they know the shared secret, over TCP. A message that does not decode ends the connection. Nothing is
ever unpickled.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from bifolio.api.branch_messages import BranchCall as BranchCall
from bifolio.api.branch_messages import BranchReply as BranchReply
from bifolio.api.branch_messages import BranchUse as BranchUse
from bifolio.api.branch_messages import Image as Image
from bifolio.api.branch_messages import SnapshotInfo as SnapshotInfo
from bifolio.api.branch_messages import SnapshotSettings as SnapshotSettings
from bifolio.api.branch_messages import SnapshotVerb as SnapshotVerb
from bifolio.config.transfer import TransferSettings
from bifolio.errors import FaultKind
from bifolio.sessions import SessionHint

MAX_FRAME_BYTES = 256 << 20
MAX_FRAME_ENTRIES = 200_000  # tokens and logprobs of one frame of updates: some megabytes


class KvEventSettings(msgspec.Struct):
    """Where an engine publishes its KV events (`serve.process.kv_events`)."""

    endpoint: str  # tcp://*:5557; * as the port: any
    replay_endpoint: str  # tcp://*:5558
    topic: str = ""


class Launch(msgspec.Struct, tag="launch"):
    """First message to a new engine process: the arguments of `LLM`."""

    options: dict[str, Any]
    max_updates_per_second: float | None = None  # of all requests together; None: by the device
    kv_events: KvEventSettings | None = None
    transfer: TransferSettings | None = None  # prefill and decode on separate engines; None: on this one
    snapshots: SnapshotSettings | None = None  # None: clients keep none


class Thinking(msgspec.Struct, array_like=True):
    """Reasoning at the start of an answer, as tokens (`sampling.thinking`)."""

    opening: list[int]
    closing: list[int]
    forced: list[int]
    budget: int | None = None


class Start(msgspec.Struct, tag="start", omit_defaults=True):
    """Run a request."""

    id: str
    prompt_token_ids: list[int]
    params: dict[str, Any]  # fields of SamplingParams or BeamSearchParams that differ from the default
    grammar: tuple[str, str] | None = None  # (kind, text)
    is_beam_search: bool = False
    final_only: bool = False  # one update, at the end
    priority: int = 0
    salt: bytes = b""
    wants_steps: bool = False  # updates carry verified drafts and steps of a beam search
    key: str = ""  # of the client: keys take turns
    owner: str = ""  # name of the tenant, for `/live`
    share: str = ""  # key or address of the client: slots, prefill and the queue are divided between them
    thinking: Thinking | None = None  # the grammar begins behind the reasoning, whose length may be limited
    keeps: bool = False  # the blocks stay after the end, for follow-ups
    parent: str = ""  # id of a kept request that this one may continue
    prefill_at: str = ""  # the prefill engine that a gateway chose (`serve.process.block_transfer`)
    branch: str = ""  # name of the branch that it continues or scores; the prompt is then empty, or scored behind it
    branch_use: BranchUse = "beside"
    wants_receipt: bool = False  # the end carries a receipt
    images: list[Image] = []  # of the prompt, in order
    adapters: list[tuple[str, float]] = []  # names of low-rank adapters with factors: their sum
    session: SessionHint | None = None  # the conversation that it belongs to


class Control(msgspec.Struct, tag="control", omit_defaults=True):
    """Pause the engine, let it go on, or give it other weights."""

    id: str
    verb: Literal["pause", "resume", "update", "reset", "sleep", "wake", "look", "join", "expect", "take", "leave"]
    aborts: bool = False  # of a pause: requests end, else they wait
    path: str = ""  # folder of the weights
    level: int = 1  # of sleep
    tags: list[str] | None = None  # the parts that wake; None: all
    host: str = ""  # of a communicator that a trainer joins
    port: int = 0
    world_size: int = 0
    backend: str = ""  # nccl or gloo; "": the best of this machine
    trainer_uuid: str = ""  # of its GPU
    name: str = ""  # of a tensor that the trainer sends next
    dtype: str = ""
    shape: list[int] = []


class Abort(msgspec.Struct, tag="abort"):
    ids: list[str]


class Stop(msgspec.Struct, tag="stop"):
    """End one completion: the front end has found a stop text in it."""

    id: str
    index: int
    stop_reason: str


class Pooling(msgspec.Struct, array_like=True, omit_defaults=True):
    """The options of a request for a vector or scores."""

    task: Literal["embed", "token_embed", "classify", "score"] = "embed"
    dimensions: int | None = None
    use_activation: bool | None = None
    second_start: int = 0  # of a pair of texts: the first token of the second one
    key: str = ""  # of the client: keys take turns
    share: str = ""  # key or address of the client
    salt: bytes = b""
    adapters: list[tuple[str, float]] = []  # names with factors


class Embed(msgspec.Struct, tag="embed", omit_defaults=True):
    """The vector or the scores of one text, or of a pair."""

    id: str
    token_ids: list[int]
    pooling: Pooling = msgspec.field(default_factory=Pooling)


class Look(msgspec.Struct, tag="look"):
    """Ask for a picture of slots and blocks."""

    id: str


class Remember(msgspec.Struct, tag="remember", omit_defaults=True):
    """Store a conversation (`serve.process.conversations`)."""

    name: str
    owner: str
    request_id: str
    body: bytes
    share: str = ""  # key or address of the client, among which the store is divided
    salt: bytes = b""
    token_ids: bytes = b""  # i32[t] of the conversation


class Recall(msgspec.Struct, tag="recall", omit_defaults=True):
    """Ask for a stored conversation, and drop it if `drops`."""

    id: str
    name: str
    owner: str
    drops: bool = False
    share: str = ""
    salt: bytes = b""


class Adapt(msgspec.Struct, tag="adapt"):
    """Load an adapter from a path, or forget its name where there is none; the answer is an `AdapterList`.

    With `scales` nothing is loaded: they are the factors of the adapters of all requests that name none.
    """

    id: str
    name: str
    path: str = ""
    in_place: bool = False  # the name may be known: its adapter is replaced
    scales: dict[str, float] | None = None


class Shutdown(msgspec.Struct, tag="shutdown"):
    """Abort everything and exit."""


ToEngine = (
    Launch | Start | Abort | Stop | Embed | Look | Remember | Recall | Adapt | BranchCall | Control | Shutdown
)  # fmt: skip


class AdapterInfo(msgspec.Struct, array_like=True):
    """A low-rank adapter of an engine, by its name in requests."""

    name: str
    number: int  # order of the first load, from 1 on
    path: str
    is_loaded: bool = True  # else it is read when it is used
    scale: float = 0.0  # its factor in requests that name no adapter


class Hello(msgspec.Struct, tag="hello"):
    """The engine is ready."""

    pid: int
    model_name: str
    kernels: str
    max_model_len: int
    max_num_seqs: int
    vocab_size: int
    num_blocks: int
    block_size: int
    plan: list[str]  # the memory plan, for people
    kv_cache_dtype: str = ""
    enable_prefix_caching: bool = True
    kv_events: KvEventSettings | None = None  # where they are published
    transfer_port: int = 0  # where blocks are served to decode engines; 0: they are not
    short_context: int | None = None  # of a model with two sets of rotation frequencies (`bifolio.long_rope`)
    adapters: list[AdapterInfo] = []  # as of the start; heartbeats have later ones
    loads_adapters: bool = False  # unknown names may be adapters, which are loaded on first use


class Fatal(msgspec.Struct, tag="fatal"):
    """The engine cannot start: a setting or file that no restart will change."""

    message: str


class Refused(msgspec.Struct, tag="refused"):
    """The request was not accepted."""

    id: str
    kind: FaultKind
    message: str


class NewTokens(msgspec.Struct, array_like=True, omit_defaults=True):
    """The new tokens of one completion. The front end makes text of them and looks for stop texts."""

    index: int
    token_ids: bytes  # i32[t]
    scores: bytes | None = None  # one record for each token (`logprob_records`)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    text: str | None = None  # of a completion that is chosen at the end: the engine needs its text itself
    cumulative_logprob: float | None = None
    score: float | None = None  # of a beam


class Ended(msgspec.Struct, array_like=True):
    """Numbers of a request's life, in seconds."""

    queue_time: float
    prefill_time: float
    decode_time: float
    num_cached_tokens: int
    num_preemptions: int
    error: str | None = None
    fault: FaultKind | None = None  # of the error
    receipt: dict[str, Any] | None = None
    weight_version: int = 0  # of the weights that computed the last token
    num_weight_changes: int = 0
    num_forced_tokens: int = 0  # of the output: appended without a step


class Update(msgspec.Struct, array_like=True, omit_defaults=True):
    """The new output of one request."""

    id: str
    pieces: list[NewTokens]
    prompt_scores: bytes | None = None  # one record for each prompt token from the second on
    ended: Ended | None = None
    num_cached_tokens: int | None = None  # in the first update
    drafts: list[tuple[int, int, list[int], int]] | None = None  # completion, position, guesses, how many were right
    beams: list[tuple[int, list[tuple[int, int, float, bool]]]] | None = None  # position, (parent, token, score, ended)

    @property
    def num_entries(self) -> int:
        """Tokens and logprobs, about: the size of the update, for limits."""
        count = 0 if self.prompt_scores is None else len(self.prompt_scores) // 8
        for piece in self.pieces:
            count += len(piece.token_ids) // 4 + (0 if piece.scores is None else len(piece.scores) // 8)
        return count


class Updates(msgspec.Struct, tag="updates"):
    items: list[Update]


class Embedding(msgspec.Struct, tag="embedding"):
    id: str
    vector: bytes  # f32[d], f32[tokens, d] or f32[labels], little-endian


class Recalled(msgspec.Struct, tag="recalled"):
    """A stored conversation; the body is empty if there is none of this name."""

    id: str
    request_id: str = ""
    body: bytes = b""
    token_ids: bytes = b""


class AdapterList(msgspec.Struct, tag="adapters"):
    """The adapters after a change."""

    id: str
    adapters: list[AdapterInfo]


class Controlled(msgspec.Struct, tag="controlled"):
    id: str
    weight_version: int
    is_sleeping: bool = False


BLOCK_HELD = 2  # BLOCK_HELD + slot % BLOCK_COLOURS is the state of a block that a slot holds
BLOCK_COLOURS = 250


class Picture(msgspec.Struct, tag="picture"):
    """Slots and blocks at one moment."""

    id: str
    slots: list[dict[str, Any]]
    waiting: list[dict[str, Any]]
    stats: dict[str, float]
    blocks: bytes  # u8[2 * num_blocks]: per block its state and how many sequences hold it
    sessions: list[dict[str, Any]] = []


class Beat(msgspec.Struct, tag="beat"):
    """Sent twice a second: the engine's counters, and that its process is alive."""

    stats: dict[str, float]
    step_seconds: float = 0.0  # how long the present step has been running
    adapters: list[AdapterInfo] = []


FromEngine = (
    Hello | Fatal | Refused | Updates | Embedding | Picture | Recalled | AdapterList | BranchReply | Controlled | Beat
)  # fmt: skip


_encoder = msgspec.msgpack.Encoder()
to_engine_decoder = msgspec.msgpack.Decoder(ToEngine)
from_engine_decoder = msgspec.msgpack.Decoder(FromEngine)


def frame(message: msgspec.Struct) -> bytes:
    body = _encoder.encode(message)
    return len(body).to_bytes(4, "little") + body


class FrameReader:
    """Cuts a stream of bytes into messages."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[Any], max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._decoder = decoder
        self.max_bytes = max_bytes  # of a frame
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """The messages that are complete with these bytes."""
        buffer = self._buffer
        buffer += data
        messages = []
        start = 0
        while len(buffer) - start >= 4:
            size = int.from_bytes(buffer[start : start + 4], "little")
            if size > self.max_bytes:
                raise ValueError(f"a frame of {size} bytes is longer than the {self.max_bytes} allowed")
            end = start + 4 + size
            if len(buffer) < end:
                break
            messages.append(self._decoder.decode(memoryview(buffer)[start + 4 : end]))
            start = end
        del buffer[:start]
        return messages
