"""The newest text of each slot, for llama.cpp's slot files."""

from __future__ import annotations

from typing import NamedTuple

from bifolio.adapter_salt import digest_of_adapter
from bifolio.errors import RequestError
from bifolio.images import PromptImage
from bifolio.sequence import Request


class SlotText(NamedTuple):
    """A text that a slot had, with all that its blocks depend on."""

    source: Request | list[int]
    salt: bytes
    adapter: bytes  # digest; empty: of the base
    images: tuple[PromptImage, ...]

    @property
    def token_ids(self) -> list[int]:
        return list(self.source if isinstance(self.source, list) else self.source.sequences[0].token_ids)


class SlotTexts:
    """The newest text of every slot and client, which llama.cpp's slot files save."""

    def __init__(self) -> None:
        self._texts: dict[tuple[int, str], SlotText] = {}

    def taken(self, slot: int, owner: str, request: Request) -> None:
        text = SlotText(request, request.salt, digest_of_adapter(request.adapter), request.images)
        self._texts[slot, owner] = text

    def restored(self, slot: int, owner: str, text: SlotText) -> None:
        self._texts[slot, owner] = text

    def find(self, slot: int, owner: str) -> SlotText:
        found = self._texts.get((slot, owner))
        if found is None:
            raise RequestError(f"slot {slot} has no text of this key: send a request first")
        return found

    def erase(self, slot: int, owner: str) -> int:
        count = len(self.find(slot, owner).token_ids)
        del self._texts[slot, owner]
        return count
