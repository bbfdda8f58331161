"""Reading a vocabulary for grammars: once, while the engine is idle, or for the first request with a grammar."""

from __future__ import annotations

import logging
import time

from bifolio.errors import BifolioError
from bifolio.model.loaded import TextModel
from bifolio.serve.process.fairness import FairThread

logger = logging.getLogger(__name__)
IDLE_LOOKS = 4  # in a row that find the engine idle


class GrammarStart:
    """The library holds up all threads while it reads, for seconds with a large vocabulary.

    So a server is ready before, and reads when no request runs.
    """

    def __init__(self, model: TextModel, thread: FairThread) -> None:
        self._model, self._thread = model, thread
        self._num_idle = 0
        self._has_begun = False
        self.ready_at: float | None = None  # of `time.monotonic`; None: not yet

    def look(self, *, is_idle: bool) -> None:
        """From any thread, now and then."""
        self._num_idle = self._num_idle + 1 if is_idle else 0
        if self._num_idle >= IDLE_LOOKS:
            self.begin()

    def begin(self) -> None:
        """Queue the reading before the grammars that come later; RuntimeError if the system starts no thread."""
        if not self._has_begun:
            self._thread.submit("", self._read)
            self._has_begun = True

    def _read(self) -> None:
        from bifolio.sampling.grammar import prepare_compiler

        try:
            prepare_compiler(self._model)
        except BifolioError as error:  # requests with a grammar are refused; all others are served
            logger.warning("requests with a grammar will be refused: %s", error)
        finally:
            self.ready_at = time.monotonic()
