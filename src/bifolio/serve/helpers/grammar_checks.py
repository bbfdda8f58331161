"""Grammars of clients: a helper process compiles and follows them first; the engine compiles only cheap ones."""

from __future__ import annotations

import hashlib
from collections import OrderedDict

from bifolio.serve.helpers import helper_messages as h
from bifolio.serve.helpers.helper import Helper
from bifolio.serve.http.errors import bad_request

MAX_KNOWN = 1024  # outcomes that are kept


class GrammarChecks:
    """Outcomes of checks by digest: a grammar that was refused once is refused at once."""

    def __init__(self, helper: Helper) -> None:
        self._helper = helper
        self._known: OrderedDict[bytes, str | None] = OrderedDict()  # digest -> reason of the refusal

    async def require(self, kind: str, text: str, share: str) -> None:
        """Refuse a grammar that is wrong, or that takes too much time or memory."""
        digest = hashlib.sha256(f"{kind}\0{text}".encode("utf-8", "surrogatepass")).digest()
        if digest in self._known:
            self._known.move_to_end(digest)
        else:
            outcome = await self._helper.ask(h.Check(kind, text), share)
            reason = None
            if isinstance(outcome, h.Failed):
                slow = outcome.kind == h.KILLED
                reason = "the grammar takes too much time or memory: make it simpler" if slow else outcome.message
            self._known[digest] = reason
            while len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        reason = self._known.get(digest)
        if reason is not None:
            raise bad_request(reason, "structured_outputs", "invalid_grammar")

    async def close(self) -> None:
        await self._helper.close()
