"""Stored conversations of `/v1/responses`, in the engine's process: one store for all front ends.

An entry names the engine request whose blocks are kept, so that a follow-up computes only its new tokens. The store is
bounded by number and bytes. The share that takes the most room (the client's key, or its address without keys) makes
room: its entry that was not used for the longest time is dropped, with its blocks. So no client drops the entries of
another one that takes less.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from bifolio.api import messages as m
from bifolio.engine.engine import InferenceEngine
from bifolio.engine.thread import EngineThread
from bifolio.errors import RequestError
from bifolio.images import TEXT_ONLY, PromptImage
from bifolio.model.loaded import TextModel
from bifolio.model.vision.prompt import checked_image
from bifolio.sampling_params import SamplingParams
from bifolio.sequence import Request, RequestOptions

Send = Callable[[m.FromEngine], None]
MAX_ENTRIES = 1024
MAX_ENTRIES_PER_KEY = 256
MAX_BYTES = 64 << 20  # of all entries
MAX_ENTRY_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Conversation:
    """A stored response."""

    owner: str  # name of the tenant
    request_id: str  # of the engine, whose blocks may be kept
    body: bytes  # as the front end encoded it
    share: str = ""  # key or address of the client
    salt: bytes = b""
    token_ids: bytes = b""  # i32[t]

    @property
    def num_bytes(self) -> int:
        return len(self.body) + len(self.token_ids)


@dataclass(slots=True)
class _Share:
    """The entries of one key or address."""

    names: OrderedDict[str, None] = field(default_factory=OrderedDict)  # the least recently used first
    num_bytes: int = 0


class ConversationStore:
    """Entries by name, for any thread. An entry is found by its owner alone."""

    def __init__(
        self, max_entries: int = MAX_ENTRIES, max_per_share: int = MAX_ENTRIES_PER_KEY, max_bytes: int = MAX_BYTES
    ) -> None:
        self._max_entries = max_entries
        self._max_per_share = max_per_share
        self._max_bytes = max_bytes
        self._entries: dict[str, Conversation] = {}
        self._shares: dict[str, _Share] = {}
        self._num_bytes = 0
        self._lock = threading.RLock()
        self.on_dropped: Callable[[str, Conversation], None] | None = None  # for want of room
        self.on_miss: Callable[[m.Recall], bool] | None = None  # whether it answers itself
        self.on_deleted: Callable[[str, Conversation], None] | None = None  # by its client

    def __len__(self) -> int:
        return len(self._entries)

    def newest_first(self) -> list[tuple[str, Conversation]]:
        return list(reversed(self._entries.items()))

    def handle(
        self, message: m.Remember | m.Recall, send: Callable[[m.FromEngine], None], thread: EngineThread
    ) -> None:
        """Store or look up a conversation; called from one thread. Blocks of dropped entries are released."""
        ended: list[str]
        if isinstance(message, m.Remember) and not message.body:  # a turn that ended without an answer to store
            ended = [message.request_id]
        elif isinstance(message, m.Remember):
            ended = self.add(message.name, _conversation(message))
        else:
            entry, ended = self.find(message.name, message.owner), []
            if entry is None and self.on_miss is not None and self.on_miss(message):
                return
            if entry is not None and message.drops:
                self.drop(message.name)
                if self.on_deleted is not None:
                    self.on_deleted(message.name, entry)
                ended = [entry.request_id]
            send(recalled(message.id, entry))

        def release(engine: InferenceEngine) -> None:
            for request_id in ended:
                engine.release(request_id)

        if ended:
            thread.post(release)

    def add(self, name: str, entry: Conversation) -> list[str]:
        """Store an entry; the engine requests whose blocks need not be kept any longer."""
        with self._lock:
            return self._add(name, entry)

    def _add(self, name: str, entry: Conversation) -> list[str]:
        if entry.num_bytes > min(MAX_ENTRY_BYTES, self._max_bytes):
            return [entry.request_id]
        dropped = [self._pop(name)] if name in self._entries else []
        share = self._shares.setdefault(entry.share, _Share())
        self._entries[name], share.names[name] = entry, None
        self._num_bytes += entry.num_bytes
        share.num_bytes += entry.num_bytes
        if len(share.names) > self._max_per_share:
            dropped.append(self._make_room(share))
        while self._num_bytes > self._max_bytes:
            dropped.append(self._make_room(max([share, *self._shares.values()], key=lambda one: one.num_bytes)))
        while len(self._entries) > self._max_entries:
            dropped.append(self._make_room(max([share, *self._shares.values()], key=lambda one: len(one.names))))
        return [entry.request_id for entry in dropped]

    def find(self, name: str, owner: str) -> Conversation | None:
        with self._lock:
            entry = self._entries.get(name)
            if entry is None or entry.owner != owner:
                return None
            self._shares[entry.share].names.move_to_end(name)
            return entry

    def drop(self, name: str) -> None:
        with self._lock:
            if name in self._entries:
                self._pop(name)

    def _make_room(self, share: _Share) -> Conversation:
        name = next(iter(share.names))
        entry = self._pop(name)
        if self.on_dropped is not None:
            self.on_dropped(name, entry)
        return entry

    def _pop(self, name: str) -> Conversation:
        entry = self._entries.pop(name)
        share = self._shares[entry.share]
        del share.names[name]
        share.num_bytes -= entry.num_bytes
        self._num_bytes -= entry.num_bytes
        if not share.names:
            del self._shares[entry.share]
        return entry


def _conversation(message: m.Remember) -> Conversation:
    return Conversation(message.owner, message.request_id, message.body, message.share, message.salt, message.token_ids)


def recalled(message_id: str, entry: Conversation | None) -> m.Recalled:
    if entry is None:
        return m.Recalled(message_id)
    return m.Recalled(message_id, entry.request_id, entry.body, entry.token_ids)


def images_of(images: list[m.Image], count: int, model: TextModel) -> tuple[PromptImage, ...]:
    """The images of a prompt of `count` tokens, checked."""
    vision = model.vision
    if not images:
        return ()
    if vision is None:
        raise RequestError(TEXT_ONLY)
    try:
        return tuple(checked_image(vision, *image.arrays(), count) for image in images)
    except ValueError as error:
        raise RequestError(f"an image of the request is damaged: {error}") from error


def add_or_fork(engine: InferenceEngine, message: m.Start, params: SamplingParams, options: RequestOptions) -> Request:
    """Add a request: as a branch of a kept one whose tokens its prompt continues, else by itself."""
    prompt, parent = message.prompt_token_ids, engine.batcher.kept(message.parent) if message.parent else None
    known = [] if parent is None else list(parent.token_ids)
    is_branch = parent is not None and parent.request.salt == message.salt and len(prompt) > len(known)
    is_branch = is_branch and not (message.images or (parent is not None and parent.request.images))
    if is_branch and prompt[: len(known)] == known:
        request = engine.fork(message.parent, message.id, prompt[len(known) :], params, **options)
    else:
        request = engine.add_request(message.id, prompt, params, **options)
    if message.keeps:
        engine.keep(message.id)
    return request
