"""The prefill engines that a decode engine may use: which one computes a prompt, and where its blocks are served.

`PrefillEngines`: an engine is named by the HTTP address of its server, which says at `/kv_transfer` where blocks are
served. Only configured addresses are ever connected to, so that no client chooses one.
`RoutedPrefillEngines`: the front end names the engine with each request, such as a front end of `bifolio.cluster`.
"""

from __future__ import annotations

import itertools
import json
import logging
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence

from bifolio.config.transfer import Address, BlockSource, TransferSettings
from bifolio.engine.transfer.blocks import Sizes
from bifolio.engine.transfer.decode import CONNECT_SECONDS, BlockFetcher
from bifolio.engine.transfer.prefill import EngineCalls
from bifolio.errors import ConfigError

logger = logging.getLogger(__name__)
INFO_PATH = "/kv_transfer"
MAX_INFO_BYTES = 1 << 16
RETRY_SECONDS = 5.0  # that a server which did not answer is left out


class PrefillEngines:
    """Fetches the blocks of prompts from the configured engines; `fetch` may be called from several threads."""

    def __init__(self, calls: EngineCalls, sizes: Sizes, settings: TransferSettings) -> None:
        self._settings = settings
        self._fetcher = BlockFetcher(calls, sizes, settings.secret, threshold=settings.threshold)
        self._known: dict[str, Address] = {}  # HTTP address -> where blocks are served
        self._silent: dict[str, float] = {}  # HTTP address -> when it is asked again
        self._turns = itertools.count()
        self._lock = threading.Lock()

    def fetch(self, token_ids: Sequence[int], salt: bytes, asked: str = "") -> int:
        """Fetch blocks from the engine that a gateway `asked` for, or from the next in turn; how many arrived."""
        address = self._address(asked)
        if address is None:
            return 0
        found = self._fetcher.fetch(address, token_ids, salt)
        if not found.is_whole:
            self._forget(address)
        return found.num_blocks

    def _address(self, asked: str) -> Address | None:
        known = self._settings.prefill_addresses
        if asked.startswith("kv:"):  # kv_transfer_params: the address of the blocks themselves
            wanted = Address.parse(asked.removeprefix("kv:"))
            served = [self._served(http) for http in known]
            return wanted if wanted in served else None
        if asked:
            return self._served(asked) if asked in known else None
        start = next(self._turns)
        for step in range(len(known)):
            address = self._served(known[(start + step) % len(known)])
            if address is not None:
                return address
        return None

    def _served(self, http: str) -> Address | None:
        """Where the engine behind an HTTP server serves its blocks; None while the server does not answer."""
        with self._lock:
            if http in self._known:
                return self._known[http]
            if time.monotonic() < self._silent.get(http, 0.0):
                return None
        try:
            address = ask(http)
        except (OSError, ValueError, KeyError, TypeError, ConfigError, urllib.error.URLError) as error:
            logger.warning("the prefill server %s does not say where its blocks are: %s", http, error)
            with self._lock:
                self._silent[http] = time.monotonic() + RETRY_SECONDS
            return None
        with self._lock:
            self._known[http] = address
        return address

    def _forget(self, address: Address) -> None:
        """Ask the server again before its next turn: it may have been restarted on another port."""
        with self._lock:
            self._known = {http: known for http, known in self._known.items() if known != address}


class RoutedPrefillEngines:
    """Fetches the blocks of each prompt from the engine that the front end chose; `fetch` is thread-safe."""

    def __init__(self, calls: EngineCalls, sizes: Sizes, settings: TransferSettings) -> None:
        self._fetcher = BlockFetcher(calls, sizes, threshold=settings.threshold)
        self._silent: dict[Address, float] = {}  # address -> when it is connected to again

    def fetch(self, token_ids: Sequence[int], salt: bytes, asked: str = "") -> int:
        """Fetch blocks from a `BlockSource`; how many arrived. One that sent nothing is left out for a while."""
        if not asked:
            return 0
        address, secret = BlockSource.parse(asked)
        if time.monotonic() < self._silent.get(address, 0.0):
            return 0
        found = self._fetcher.fetch(address, token_ids, salt, secret)
        if found.is_whole or found.num_blocks:
            self._silent.pop(address, None)
        else:
            self._silent[address] = time.monotonic() + RETRY_SECONDS
        return found.num_blocks


def ask(http: str) -> Address:
    """The answer of a prefill server to the question where its blocks are served."""
    host = Address.parse(http).host
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://{http}{INFO_PATH}", timeout=CONNECT_SECONDS) as answer:
        found = json.loads(answer.read(MAX_INFO_BYTES))
    port = int(found["remote_port"])
    return Address.parse(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
