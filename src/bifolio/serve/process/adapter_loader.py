"""The adapters of an engine for the requests of its clients: read on a thread of their own, beside the steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from bifolio.api import messages as m
from bifolio.engine.adapters import AdapterStore, LoadedAdapter
from bifolio.errors import BifolioError, FaultKind, RequestError
from bifolio.serve.process.fairness import FairThread

Found = Callable[[LoadedAdapter | None], None]
Named = list[tuple[str, float]]  # names with factors
Failed = Callable[[str, BifolioError], None]


class AdapterLoader:
    """Finds the adapters of requests. Those in memory are found at once; files are read one after the other."""

    def __init__(self, store: AdapterStore) -> None:
        self._store = store
        self._thread = FairThread("bifolio-adapters")
        self._scales: dict[str, float] = {}  # of requests that name no adapter
        self._waiting: set[str] = set()  # ids of requests whose adapters are read

    def close(self) -> None:
        self._thread.close()

    def known(self) -> list[m.AdapterInfo]:
        return [
            m.AdapterInfo(each.name, each.number, each.path, each.loaded is not None, self._scales.get(each.name, 0.0))
            for each in self._store.all()
        ]

    def find(self, request_id: str, named: Named, share: str, found: Found, failed: Failed) -> None:
        """Call `found` with the sum of the request's adapters, or `failed`; from this thread or from another."""
        adapter = self._store.in_memory(named)
        if adapter is not None:
            return found(adapter)
        self._waiting.add(request_id)
        try:
            self._thread.submit(share, partial(self._read, request_id, named, found, failed))
        except RuntimeError:  # the system starts no further thread
            failed(request_id, RequestError("no thread is free to read the adapter: ask again later"))

    def abort(self, request_ids: list[str]) -> None:
        """Forget requests that wait for their adapters."""
        self._waiting.difference_update(request_ids)

    def change(self, message: m.Adapt, send: Callable[[m.FromEngine], None]) -> None:
        """Load, forget or scale adapters, and send the names that are known then, or the reason why not."""

        def work() -> None:
            try:
                if message.scales is not None:
                    self._scales = message.scales
                elif message.path:
                    self._store.load(message.name, message.path, in_place=message.in_place)
                else:
                    self._store.unload(message.name)
                    self._scales.pop(message.name, None)
            except (BifolioError, OSError, MemoryError) as error:
                send(m.Refused(message.id, FaultKind.INVALID_REQUEST, str(error) or type(error).__name__))
            else:
                send(m.AdapterList(message.id, self.known()))

        try:
            self._thread.submit("", work)
        except RuntimeError:  # the system starts no further thread
            send(m.Refused(message.id, FaultKind.UNAVAILABLE, "no thread is free to read the adapter: ask again later"))

    def _read(self, request_id: str, named: Named, found: Found, failed: Failed) -> None:
        if request_id not in self._waiting:
            return
        try:
            adapter = self._store.sum(named)
        except BifolioError as error:
            failed(request_id, error)
        except (OSError, MemoryError) as error:
            failed(request_id, RequestError(f"the adapter cannot be read: {error}"))
        else:
            if request_id in self._waiting:
                found(adapter)
        finally:
            self._waiting.discard(request_id)
