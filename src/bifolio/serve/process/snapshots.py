"""Snapshots of clients, in the engine's process: texts with their blocks in files, by name and key.

    save      engine's thread: copies of the blocks        then a thread of its own: the file
    restore   a thread of its own: the file, checked       then the engine's thread: blocks into the cache, a branch

Stored responses are saved when the server ends, when a model is evicted, and when the store makes room for others; a
follow-up reads them back. With a tier of files their blocks are there already, and the snapshot has the tokens alone.
"""

from __future__ import annotations

import base64
import binascii
import logging
import threading
import time
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from typing import Any, get_args

from bifolio.adapter_salt import digest_of_adapter
from bifolio.api import messages as m
from bifolio.api.llm import LLM
from bifolio.engine.adapters import LoadedAdapter
from bifolio.engine.engine import InferenceEngine
from bifolio.engine.thread import EngineThread
from bifolio.engine.tiers.snapshots import Snapshot, capture, read_snapshot, restore
from bifolio.errors import BifolioError, FaultKind, RequestError
from bifolio.images import PromptImage
from bifolio.serve.process.conversations import Conversation, ConversationStore, recalled
from bifolio.serve.process.slot_texts import SlotText, SlotTexts
from bifolio.serve.process.snapshot_files import RESPONSE, SESSION, SnapshotFiles
from bifolio.serve.process.text_branches import BranchTable

logger = logging.getLogger(__name__)
Send = Callable[[m.FromEngine], None]
VERBS = frozenset(get_args(m.SnapshotVerb))
WITHOUT_FOLDER = ("erase_slot", "list_sessions", "forget_session")  # verbs
NO_FOLDER = "this server keeps no snapshots: start it with --snapshot-dir DIR"
CLOSE_SECONDS = 4.0  # for saving stored responses at the end


class UnknownSessionError(RequestError):
    """There is no conversation of this name for this client."""

    fault = FaultKind.UNKNOWN_SNAPSHOT


def session_file(name: str) -> str:
    """The name of the file of a pinned conversation, whose own name is any text."""
    return blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


class Snapshots:
    """The verbs of `BranchCall` on snapshots, and those of the server itself. `handle` is called from any thread."""

    def __init__(
        self, llm: LLM, thread: EngineThread, branches: BranchTable, conversations: ConversationStore, send: Send
    ) -> None:
        self._llm, self._thread, self._branches, self._send = llm, thread, branches, send
        self._conversations = conversations
        self._files: SnapshotFiles | None = None
        self._worker = ThreadPoolExecutor(1, "bifolio-snapshots")
        self.slots = SlotTexts()
        self._reading: set[str] = set()  # ids of requests whose session is being read
        self._restored: set[str] = set()  # ids of requests whose session was read
        self._read_lock = threading.RLock()

    def open(self, settings: m.SnapshotSettings) -> None:
        """Keep files in a folder, and stored responses among them."""
        engine = self._llm.engine
        self._files = SnapshotFiles(settings, engine.digests.of(engine.model)[0])
        self._conversations.on_dropped = self._save_dropped
        self._conversations.on_miss = self._load_missing
        self._conversations.on_deleted = self._remove_deleted

    # -- verbs of clients ----------------------------------------------------------------------------------------------
    def handle(self, message: m.BranchCall, adapter: LoadedAdapter | None = None) -> None:
        """Run a verb and answer later; `adapter` is that of the message."""
        begin: dict[str, Callable[[m.BranchCall], None]] = {
            "save": lambda call: self._thread.post(
                lambda engine: self._guarded(call, self._save, engine, digest_of_adapter(adapter))
            ),
            "save_slot": lambda call: self._thread.post(lambda engine: self._guarded(call, self._save_slot, engine)),
            "erase_slot": lambda call: self._thread.post(lambda engine: self._guarded(call, self._erase_slot, engine)),
            "restore": lambda call: self._on_worker(call, self._read, adapter),
            "restore_slot": lambda call: self._on_worker(call, self._read, None),
            "list": lambda call: self._on_worker(call, self._list),
            "forget": lambda call: self._on_worker(call, self._forget),
            "list_sessions": lambda call: self._on_worker(call, self._list_sessions),
            "forget_session": lambda call: self._thread.post(
                lambda engine: self._guarded(call, self._forget_session, engine)
            ),
        }
        if self._files is None and message.verb not in WITHOUT_FOLDER:
            self._send(m.Refused(message.id, FaultKind.INVALID_REQUEST, NO_FOLDER))
        else:
            begin[message.verb](message)

    def _guarded(self, message: m.BranchCall, verb: Callable[..., None], *arguments: Any) -> None:
        try:
            verb(message, *arguments)
        except RequestError as error:
            self._send(m.Refused(message.id, error.fault, str(error)))
        except BifolioError as error:  # a snapshot that is damaged, or of another model or arithmetic
            self._send(m.Refused(message.id, FaultKind.INVALID_REQUEST, str(error)))
        except Exception as error:
            logger.exception("a verb on snapshots failed")
            self._send(m.Refused(message.id, FaultKind.ENGINE_ERROR, f"the snapshot failed: {type(error).__name__}"))

    def _on_worker(self, message: m.BranchCall, verb: Callable[..., None], *arguments: Any) -> None:
        self._worker.submit(self._guarded, message, verb, *arguments)

    def _save(self, message: m.BranchCall, engine: InferenceEngine, adapter: bytes) -> None:
        """On the engine's thread: copy the blocks, and queue the file."""
        images: tuple[PromptImage, ...] | None = None
        cache_salt, num_prompt = message.cache_salt, None
        if message.name:
            branch = self._branches.state_of(message.name, message.owner)
            tokens, num_prompt, cache_salt = branch.token_ids, branch.num_prompt, branch.salt[len(message.salt) :]
            adapter, images = digest_of_adapter(branch.adapter), branch.images
        elif message.response:
            entry = self._conversations.find(message.response, message.owner)
            if entry is None:
                raise RequestError(f"no response is stored under {message.response!r}: it was dropped or never stored")
            tokens = array("i", entry.token_ids).tolist()
        else:
            tokens = message.token_ids
        self._write(message, engine, tokens, cache_salt, num_prompt, adapter, images)

    def _save_slot(self, message: m.BranchCall, engine: InferenceEngine) -> None:
        text = self.slots.find(message.count, message.owner)
        cache_salt = text.salt[len(message.salt) :]
        self._write(message, engine, text.token_ids, cache_salt, None, text.adapter, text.images)

    def _write(
        self,
        message: m.BranchCall,
        engine: InferenceEngine,
        tokens: list[int],
        cache_salt: bytes,
        num_prompt: int | None,
        adapter: bytes,
        images: tuple[PromptImage, ...] | None,
    ) -> None:
        files = self._opened()
        path = files.path(message.salt, message.file)
        notes = {"cache_salt": base64.b64encode(cache_salt).decode()}
        salt = message.salt + cache_salt
        snapshot = capture(
            engine, tokens, num_prompt=num_prompt, salt=salt, adapter=adapter, images=images, notes=notes
        )
        self._on_worker(message, lambda call: self._answer(call, [files.write(path, snapshot, call.salt)]))

    def _read(self, message: m.BranchCall, adapter: LoadedAdapter | None) -> None:
        """On the worker: read the file, and queue its way into the cache."""
        files = self._opened()
        path = files.find(message.salt, message.file)
        snapshot, info = read_snapshot(path), files.info(path)
        self._thread.post(lambda engine: self._guarded(message, self._restore, engine, snapshot, info, adapter))

    def _restore(
        self,
        message: m.BranchCall,
        engine: InferenceEngine,
        snapshot: Snapshot,
        info: m.SnapshotInfo,
        adapter: LoadedAdapter | None,
    ) -> None:
        try:
            cache_salt = base64.b64decode(str(snapshot.notes.get("cache_salt", "")), validate=True)
        except (binascii.Error, ValueError):
            cache_salt = b""  # not ours: the digest of the prefix tells
        salt = message.salt + cache_salt
        digest = digest_of_adapter(adapter) if message.verb == "restore" else None
        restore(engine, snapshot, salt=salt, adapter=digest, recompute=message.recompute)
        images = snapshot.images_for(engine.model.vision)
        if message.verb == "restore_slot":
            text = SlotText(snapshot.token_ids, salt, bytes.fromhex(snapshot.adapter), images)
            self.slots.restored(message.count, message.owner, text)
            self._answer(message, [info])
            return
        reply = self._branches.adopt(message, snapshot.token_ids, salt, snapshot.num_prompt, adapter, images)
        reply.snapshots = [info]
        self._send(reply)

    def _erase_slot(self, message: m.BranchCall, engine: InferenceEngine) -> None:
        count = self.slots.erase(message.count, message.owner)
        self._answer(message, [m.SnapshotInfo("", count, 0, time.time())])

    def _forget_session(self, message: m.BranchCall, engine: InferenceEngine) -> None:
        """Forget a conversation, and the file of a pinned one."""
        is_known = engine.blocks.release_session(message.share, message.name)
        path = None if self._files is None else self._files.path(message.salt, session_file(message.name), SESSION)
        is_file = path is not None and path.is_file()
        if not is_known and not is_file:
            raise UnknownSessionError(f"there is no session {message.name!r}: GET /v1/sessions lists them")
        if path is not None and self._files is not None:
            self._files.remove(path)
        self._answer(message, [])

    def _list_sessions(self, message: m.BranchCall) -> None:
        self._answer(message, [] if self._files is None else self._files.sessions_of(message.salt))

    def _list(self, message: m.BranchCall) -> None:
        files = self._opened()
        found = files.all_of(message.salt) if not message.file else [files.info(files.find(message.salt, message.file))]
        self._answer(message, found)

    def _forget(self, message: m.BranchCall) -> None:
        files = self._opened()
        path = files.find(message.salt, message.file)
        info = files.info(path)
        files.remove(path)
        self._answer(message, [info])

    def _answer(self, message: m.BranchCall, found: list[m.SnapshotInfo]) -> None:
        self._send(m.BranchReply(message.id, [], 0, 0, 0.0, snapshots=found))

    def _opened(self) -> SnapshotFiles:
        if self._files is None:
            raise RequestError(NO_FOLDER)
        return self._files

    # -- pinned conversations -----------------------------------------------------------------------------------------
    def restore_session(self, message: m.Start, again: Callable[[m.Start], None]) -> bool:
        """Read the blocks of a pinned conversation before its first request since the start; `again` takes it then."""
        hint, files = message.session, self._files
        if hint is None or files is None or message.id in self._restored:
            self._restored.discard(message.id)
            return False
        if self._llm.engine.blocks.has_session(message.share, hint.name):
            return False
        path = files.path(message.salt, session_file(hint.name), SESSION)
        if not path.is_file():
            return False

        def load() -> None:
            try:
                snapshot = read_snapshot(path)
                self._thread.call(lambda engine: restore(engine, snapshot, salt=message.salt)).result()
            except BifolioError as error:
                logger.warning("a pinned session cannot be used: %s", error)
                files.remove(path)
            except Exception:
                logger.exception("a pinned session could not be read")
            with self._read_lock:
                if message.id in self._reading:  # else it was aborted meanwhile
                    self._reading.discard(message.id)
                    self._restored.add(message.id)
                    again(message)

        self._reading.add(message.id)
        self._worker.submit(load)
        return True

    def abort(self, ids: list[str]) -> None:
        """Do not begin requests whose session is being read."""
        with self._read_lock:
            self._reading.difference_update(ids)

    def _save_sessions(self, engine: InferenceEngine, end: float) -> None:
        """Save the pinned conversations; with tiers their tokens alone, since their blocks are there."""
        files = self._opened()
        for session, num_cached in engine.blocks.sessions():
            path = files.path(session.salt, session_file(session.hint.name), SESSION)
            if session.token_ids is None:
                files.remove(path)  # it was pinned once
            has_blocks = num_cached or engine.tiers is not None
            if session.token_ids is None or not has_blocks or time.monotonic() > end:
                continue
            try:
                snapshot = capture(
                    engine, session.token_ids, salt=session.salt, adapter=session.adapter,
                    images=session.images, notes={"session": session.hint.name}, with_blocks=engine.tiers is None,
                )  # fmt: skip
            except BifolioError as error:
                logger.info("a pinned session was not saved: %s", error)
                continue
            self._worker.submit(self._write_response, files, path, snapshot, session.salt)

    # -- stored responses ----------------------------------------------------------------------------------------------
    def save_all(self, engine: InferenceEngine) -> int:
        """Save the stored responses, the newest first, as far as the time allows; the engine's thread has ended."""
        if self._files is None:
            return 0
        end, count = time.monotonic() + CLOSE_SECONDS, 0
        for name, entry in self._conversations.newest_first():
            if time.monotonic() > end:
                logger.warning("%d stored responses were not saved in time", len(self._conversations) - count)
                break
            count += self._save_response(engine, name, entry)
        self._save_sessions(engine, end)
        self._worker.shutdown(wait=True)
        return count

    def close(self) -> None:
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _remove_deleted(self, name: str, entry: Conversation) -> None:
        files = self._opened()
        files.remove(files.path(entry.salt, name, RESPONSE))

    def _save_dropped(self, name: str, entry: Conversation) -> None:
        """The store makes room: the response stays in a file."""
        self._thread.post(lambda engine: self._save_response(engine, name, entry))

    def _save_response(self, engine: InferenceEngine, name: str, entry: Conversation) -> bool:
        files, tokens = self._opened(), array("i", entry.token_ids).tolist()
        if not tokens:
            return False
        notes = {"body": base64.b64encode(entry.body).decode()}
        try:
            path = files.path(entry.salt, name, RESPONSE)
            if path.is_file():  # of an earlier life of the server: responses do not change
                return True
            kept = engine.batcher.kept(entry.request_id)
            own: dict[str, Any] = {}
            if kept is not None:
                own = {"adapter": digest_of_adapter(kept.request.adapter), "images": kept.request.images}
            snapshot = capture(engine, tokens, salt=entry.salt, notes=notes, with_blocks=engine.tiers is None, **own)
        except BifolioError as error:
            logger.info("the response %s was not saved: %s", name, error)
            return False
        self._worker.submit(self._write_response, files, path, snapshot, entry.salt)
        return True

    def _write_response(self, files: SnapshotFiles, path: Any, snapshot: Snapshot, salt: bytes) -> None:
        try:
            files.write(path, snapshot, salt)
        except BifolioError as error:
            logger.warning("%s was not saved: %s", path.name, error)

    def _load_missing(self, message: m.Recall) -> bool:
        """Look for a response in the files; it is answered when its blocks are in the cache."""
        try:
            path = self._opened().path(message.salt, message.name, RESPONSE)
        except RequestError:
            return False
        if not path.is_file():
            return False
        self._worker.submit(self._load, message, path)
        return True

    def _load(self, message: m.Recall, path: Any) -> None:
        try:
            snapshot = read_snapshot(path)
            body = base64.b64decode(str(snapshot.notes["body"]), validate=True)
            tokens = array("i", snapshot.token_ids).tobytes()
        except (BifolioError, KeyError, ValueError, TypeError, OverflowError) as error:
            logger.warning("the response %s cannot be read: %s", message.name, error)
            self._send(m.Recalled(message.id))
            return
        if message.drops:
            self._opened().remove(path)
        self._thread.post(lambda engine: self._loaded(engine, message, snapshot, body, tokens))

    def _loaded(
        self, engine: InferenceEngine, message: m.Recall, snapshot: Snapshot, body: bytes, tokens: bytes
    ) -> None:
        try:
            restore(engine, snapshot, salt=message.salt, recompute=True)
        except BifolioError as error:
            logger.warning("the response %s cannot be used: %s", message.name, error)
            self._send(m.Recalled(message.id))
            return
        entry = Conversation(message.owner, "", body, message.share, message.salt, tokens)
        if not message.drops:
            for request_id in self._conversations.add(message.name, entry):
                engine.release(request_id)
        self._send(recalled(message.id, entry))
