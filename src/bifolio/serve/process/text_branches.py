"""Branches of `/v1/branches`, in the engine's process: by name, with an owner, limits and a time to live.

All methods run on the engine's thread. A branch is found by its owner alone; one that is not used for its time to live
is closed, and so are those of a client that forgets them.
"""

from __future__ import annotations

import secrets
import time
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from bifolio.api import messages as m
from bifolio.engine.adapters import LoadedAdapter
from bifolio.engine.branches import BranchOwner, BranchState
from bifolio.engine.engine import InferenceEngine
from bifolio.errors import FaultKind, RequestError
from bifolio.images import PromptImage
from bifolio.sampling_params import SamplingParams
from bifolio.sequence import FinishReason, Request, RequestOptions
from bifolio.serve.process.conversations import images_of

MAX_BRANCHES = 8192
MAX_BRANCHES_PER_KEY = 1024  # or address
MAX_SECONDS = 3600.0  # of the time to live
Send = Callable[[m.FromEngine], None]


@dataclass(slots=True, eq=False)
class Entry:
    """A branch and its owner."""

    state: BranchState
    name: str
    owner: str  # name of the tenant
    share: str  # key or address of the client
    seconds: float  # time to live after the last use
    adapters: list[tuple[str, float]]  # names with factors, as it was opened
    used: float = 0.0


class BranchTable:
    """The branches of all clients of one engine."""

    def __init__(self, branches: BranchOwner, send: Send) -> None:
        self._branches = branches
        self._send = send
        self._entries: dict[str, Entry] = {}
        self._per_share: Counter[str] = Counter()
        self._running: dict[str, Callable[[Request], None]] = {}  # id of a request -> the work after its end
        self._requests: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._entries)

    # -- verbs -------------------------------------------------------------------------------------------------------
    def call(self, engine: InferenceEngine, message: m.BranchCall, adapter: LoadedAdapter | None = None) -> None:
        """Run a verb and answer, at once or when the tokens that it needs are computed.

        `adapter` is that of a branch to open.
        """
        try:
            self.expire()
            if message.verb == "open":
                self._open(engine, message, adapter)
            else:
                getattr(self, f"_{message.verb}")(engine, message)
        except RequestError as error:
            self._send(m.Refused(message.id, error.fault, str(error)))

    def _open(self, engine: InferenceEngine, message: m.BranchCall, adapter: LoadedAdapter | None) -> None:
        images = images_of(message.images, len(message.token_ids), engine.model)
        entry = self._opened(message, message.token_ids, message.salt, adapter, images)
        try:
            self._compute(entry, message, lambda: self._answer(message, entry, [entry.name]))
        except BaseException:
            self._drop(entry)
            raise

    def _look(self, engine: InferenceEngine, message: m.BranchCall) -> None:
        entry = self._find(message)
        self._answer(message, entry, [entry.name], with_tokens=True)

    def _append(self, engine: InferenceEngine, message: m.BranchCall) -> None:
        entry, limit = self._find(message), engine.config.max_model_len
        if entry.state.num_tokens + len(message.token_ids) > limit:
            raise RequestError(
                f"the branch has {entry.state.num_tokens} tokens, and {len(message.token_ids)} more exceed "
                f"max_model_len={limit}: append fewer, or truncate it first"
            )
        self._branches.append(entry.state, message.token_ids, to_answer=message.to_answer)
        self._answer(message, entry, [entry.name])

    def _truncate(self, engine: InferenceEngine, message: m.BranchCall) -> None:
        entry, count = self._find(message), message.count
        self._branches.truncate(entry.state, entry.state.num_tokens + count if count < 0 else count)
        self._answer(message, entry, [entry.name])

    def _fork(self, engine: InferenceEngine, message: m.BranchCall) -> None:
        entry = self._find(message)
        self._check_room(message.share, message.count)

        def fork() -> None:
            self._check_room(message.share, message.count)
            forks = [
                Entry(self._branches.fork(entry.state), f"branch_{secrets.token_hex(12)}", entry.owner, message.share,
                      entry.seconds, entry.adapters)
                for _ in range(message.count)
            ]  # fmt: skip
            self._answer(message, entry, [self._add(fork).name for fork in forks])

        if entry.state.num_missing > engine.blocks.block_size:
            self._compute(entry, message, fork)
        else:
            fork()

    def _close(self, engine: InferenceEngine, message: m.BranchCall) -> None:
        entry = self._find(message)
        self._drop(entry)
        self._answer(message, entry, [entry.name])

    def state_of(self, name: str, owner: str) -> BranchState:
        return self._entry(name, owner).state

    def adopt(
        self,
        message: m.BranchCall,
        token_ids: list[int],
        salt: bytes,
        num_prompt: int,
        adapter: LoadedAdapter | None,
        images: tuple[PromptImage, ...],
    ) -> m.BranchReply:
        """A new branch of tokens whose blocks may be in the cache."""
        entry = self._opened(message, token_ids, salt, adapter, images)
        entry.state.num_prompt = min(num_prompt, len(token_ids))
        return _reply(message.id, entry, [entry.name])

    # -- requests ----------------------------------------------------------------------------------------------------
    def start(
        self, engine: InferenceEngine, message: m.Start, params: SamplingParams, options: RequestOptions
    ) -> Request:
        """The request of a message that continues or scores a branch."""
        entry, made = self._entry(message.branch, message.owner), {**options}
        made.pop("salt", None)
        made.pop("owner", None)
        if message.branch_use == "score":
            return self._branches.score(entry.state, message.id, message.prompt_token_ids, **made)  # type: ignore[arg-type]
        advances = message.branch_use == "advance"
        request = self._branches.generate(entry.state, message.id, params, advances=advances, **made)  # type: ignore[arg-type]
        if advances:
            self._await(request, lambda done: self._generated(entry, done))
        return request

    def ended(self, request_id: str) -> None:
        """Apply the end of a request to its branch; called before the client hears of it."""
        request = self._requests.get(request_id)
        if request is not None and request.is_finished:
            del self._requests[request_id]
            self._running.pop(request_id)(request)

    @property
    def is_waiting(self) -> bool:
        """Whether the end of a request concerns a branch."""
        return bool(self._requests)

    def expire(self) -> None:
        """Close the branches that were not used for their time to live."""
        now = time.monotonic()
        late = [entry for entry in self._entries.values() if now > entry.used + entry.seconds]
        for entry in late:
            if entry.state.changing is None:
                self._drop(entry)

    # -- details -----------------------------------------------------------------------------------------------------
    def _compute(self, entry: Entry, message: m.BranchCall, then: Callable[[], None]) -> None:
        """Compute the tokens of a branch before the rest of a verb."""
        request = self._branches.missing(entry.state, message.id)
        if request is None:
            then()
            return

        def computed(done: Request) -> None:
            if done.sequences[0].finish_reason is not FinishReason.LENGTH:
                self._branches.interrupted(entry.state, [done])
                if message.verb == "open":
                    self._drop(entry)
                fault = done.fault or FaultKind.ENGINE_ERROR
                self._send(m.Refused(message.id, fault, done.error or "the request was aborted"))
                return
            try:
                self._branches.computed(entry.state, done)
                then()
            except RequestError as error:
                self._send(m.Refused(message.id, error.fault, str(error)))

        self._await(request, computed)

    def _await(self, request: Request, then: Callable[[Request], None]) -> None:
        self._requests[request.request_id], self._running[request.request_id] = request, then

    def _generated(self, entry: Entry, request: Request) -> None:
        self._branches.generated(entry.state, request)
        entry.used = time.monotonic()

    def _find(self, message: m.BranchCall) -> Entry:
        return self._entry(message.name, message.owner)

    def _entry(self, name: str, owner: str) -> Entry:
        entry = self._entries.get(name)
        if entry is None or entry.owner != owner:
            raise UnknownBranchError(f"there is no branch {name!r}: it was closed, or not used for its time to live")
        entry.used = time.monotonic()
        return entry

    def _check_room(self, share: str, count: int) -> None:
        if self._per_share[share] + count > MAX_BRANCHES_PER_KEY or len(self._entries) + count > MAX_BRANCHES:
            raise RequestError(
                f"{self._per_share[share]} branches are open and {count} more are too many (a key has at most "
                f"{MAX_BRANCHES_PER_KEY}, all together {MAX_BRANCHES}): close those that are not needed"
            )

    def _opened(
        self,
        message: m.BranchCall,
        token_ids: list[int],
        salt: bytes,
        adapter: LoadedAdapter | None,
        images: tuple[PromptImage, ...],
    ) -> Entry:
        self._check_room(message.share, 1)
        state = self._branches.open(token_ids, salt=salt, owner=message.share, adapter=adapter, images=images)
        name, seconds = f"branch_{secrets.token_hex(12)}", min(message.seconds, MAX_SECONDS)
        return self._add(Entry(state, name, message.owner, message.share, seconds, message.adapters))

    def _add(self, entry: Entry) -> Entry:
        entry.used = time.monotonic()
        self._entries[entry.name] = entry
        self._per_share[entry.share] += 1
        return entry

    def _drop(self, entry: Entry) -> None:
        if self._entries.pop(entry.name, None) is not None:
            self._per_share[entry.share] -= 1
            self._branches.close(entry.state)

    def _answer(self, message: m.BranchCall, entry: Entry, names: list[str], *, with_tokens: bool = False) -> None:
        reply = _reply(message.id, entry, names)
        if with_tokens:
            reply.token_ids = array("i", entry.state.token_ids).tobytes()
            reply.blocks = self._branches.block_ids(entry.state)
        self._send(reply)


class UnknownBranchError(RequestError):
    """There is no branch of this name for this owner."""

    fault = FaultKind.UNKNOWN_BRANCH


def _reply(message_id: str, entry: Entry, names: list[str]) -> m.BranchReply:
    state = entry.state
    reply = m.BranchReply(message_id, names, state.num_tokens, state.num_prompt, entry.seconds)
    reply.adapters = entry.adapters
    return reply
