"""Prefill and decode on separate engines, as the service of an engine takes part: it serves blocks, or fetches them.

--role prefill   a `PrefillServer` beside the engine's thread
--role decode    a request waits on a thread of its own until its blocks are here, then it is started
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from bifolio.api.messages import Start
from bifolio.config.transfer import TransferSettings
from bifolio.engine.engine import InferenceEngine
from bifolio.engine.thread import EngineThread
from bifolio.engine.transfer.blocks import Sizes
from bifolio.engine.transfer.prefill import PrefillServer
from bifolio.engine.transfer.prefill_engines import PrefillEngines, RoutedPrefillEngines
from bifolio.long_rope import rope_of_request, salt_of_rope

logger = logging.getLogger(__name__)
MAX_FETCHES = 32  # transfers at the same time; further requests wait


class BlockTransfer:
    """One engine's part; `fetch` and `abort` may be called from any thread."""

    def __init__(self, thread: EngineThread, engine: InferenceEngine, settings: TransferSettings) -> None:
        sizes, self._config = Sizes.of(engine), engine.model.config
        self._threshold = settings.threshold  # tokens of the shortest prompt that is computed elsewhere
        self._server: PrefillServer | None = None
        self._engines: PrefillEngines | RoutedPrefillEngines | None = None
        self._waiting: set[str] = set()  # ids of requests whose blocks are being fetched
        self._lock = threading.Lock()
        if settings.role == "prefill":
            self._server = PrefillServer(thread, sizes, settings.host, settings.port, settings.secret)
        else:
            kind = RoutedPrefillEngines if settings.is_routed else PrefillEngines
            self._engines = kind(thread, sizes, settings)
            self._pool = ThreadPoolExecutor(MAX_FETCHES, thread_name_prefix="bifolio-fetch")

    @property
    def port(self) -> int:
        """Where blocks are served; 0: they are not."""
        return 0 if self._server is None else self._server.port

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def fetch(self, message: Start, start: Callable[[Start], None]) -> bool:
        """Fetch the blocks of a request, then start it, unless it is aborted meanwhile; False: its prompt stays here.

        Short prompts stay, those with images, and those with prompt logprobs, which need all logits.
        """
        engines, scores_prompt = self._engines, message.params.get("prompt_logprobs") is not None
        if engines is None or scores_prompt or message.images or len(message.prompt_token_ids) < self._threshold:
            return False
        count, most = len(message.prompt_token_ids), message.params.get("max_tokens")
        salt = salt_of_rope(rope_of_request(self._config, count, most), message.salt)
        with self._lock:
            self._waiting.add(message.id)

        def work() -> None:
            try:
                if message.id in self._waiting:
                    engines.fetch(message.prompt_token_ids, salt, message.prefill_at)
            except Exception:
                logger.exception("the blocks of a prompt could not be fetched; it is computed here")
            with self._lock:  # an abort comes before the start or is queued behind it
                if message.id in self._waiting:
                    self._waiting.discard(message.id)
                    start(message)

        self._pool.submit(work)
        return True

    def abort(self, request_ids: list[str]) -> None:
        with self._lock:
            self._waiting.difference_update(request_ids)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        else:
            self._pool.shutdown(wait=False, cancel_futures=True)
