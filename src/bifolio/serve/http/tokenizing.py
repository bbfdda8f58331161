"""Text to token ids in the front end: outside the GIL, on two threads, within a budget.

Short texts are encoded at once. Others go to one of two threads, one for texts of ordinary length and one for long
ones, so that a megabyte of one client does not delay the prompts of others. The characters that wait or run are
bounded; a request beyond the bound is refused with a 429. A text that cannot fit is refused by its beginning.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from bifolio.serve.http.errors import ApiError, bad_request
from bifolio.text.tokenizer import Tokenizer

T = TypeVar("T")
INLINE_CHARS = 2000  # of all texts of a request together: encoded at once, in about a millisecond
LONG_CHARS = 64 << 10  # from here on a request uses the thread for long texts
BUDGET_CHARS = 8 << 20  # that wait or run
CHARS_PER_TOKEN = 8  # characters of the beginning for each token of the context that decide whether a text can fit


class TokenizerPool:
    """The tokenizer of a server, for its event loop."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._short = ThreadPoolExecutor(1, thread_name_prefix="bifolio-tokenize")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="bifolio-tokenize-long")
        self._pending = 0  # characters

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise bad_request("this model has no tokenizer: pass token ids", "prompt")
        return self._tokenizer

    async def encode(
        self, texts: Sequence[str], add_special_tokens: bool, max_tokens: int | None = None
    ) -> list[list[int]]:
        """Token ids of each text. `max_tokens`: a text that certainly has more is refused."""
        tokenizer, size = self.tokenizer, sum(map(len, texts))

        def work() -> list[list[int]]:
            for text in texts if max_tokens is not None else ():
                self.check_fits(text, max_tokens or 0)
            return tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens)

        return await self._run(work, size)

    async def encode_packed(self, text: str, add_special_tokens: bool) -> array[int]:
        """Token ids of a text of any length, packed."""
        tokenizer = self.tokenizer
        return await self._run(lambda: tokenizer.encode_packed(text, add_special_tokens=add_special_tokens), len(text))

    async def encode_beginnings(self, texts: Sequence[str], max_tokens: int) -> list[list[int]]:
        """The first token ids of each text."""
        tokenizer = self.tokenizer

        def work() -> list[list[int]]:
            return [ids[:max_tokens] for ids in tokenizer.encode_batch(texts)]

        return await self._run(work, sum(map(len, texts)))

    async def encode_parts(self, parts: Sequence[tuple[str, bool]], max_tokens: int) -> list[int]:
        """Token ids of a rendered conversation: (text, whether a client wrote it) one after the other."""

        def work() -> list[int]:
            for text, _ in parts:
                self.check_fits(text, max_tokens)
            return self.tokenizer.encode_parts(parts)

        return await self._run(work, sum(len(text) for text, _ in parts))

    async def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        tokenizer = self.tokenizer
        return await self._run(lambda: tokenizer.decode(ids, skip_special_tokens), 4 * len(ids))

    async def run(self, work: Callable[[], T], size: int) -> T:
        """Other work with the tokenizer, about as expensive as `size` characters."""
        return await self._run(work, size)

    def close(self) -> None:
        self._short.shutdown(wait=False, cancel_futures=True)
        self._long.shutdown(wait=False, cancel_futures=True)

    async def _run(self, work: Callable[[], T], size: int) -> T:
        if size <= INLINE_CHARS:
            return work()
        if self._pending + size > BUDGET_CHARS and self._pending:
            raise ApiError(429, "too much text waits to be tokenised: repeat it in 1 s", "queue_full", retry_after=1)
        self._pending += size
        lane = self._short if size < LONG_CHARS else self._long
        future = asyncio.get_running_loop().run_in_executor(lane, work)
        future.add_done_callback(lambda _: self._release(size))
        return await future

    def _release(self, size: int) -> None:
        self._pending -= size

    def check_fits(self, text: str, max_tokens: int) -> None:
        """Refuse a text that certainly has more tokens."""
        beginning = CHARS_PER_TOKEN * max_tokens
        if len(text) <= 2 * beginning:
            return
        count = len(self.tokenizer.encode(text[:beginning], add_special_tokens=False))
        if count - 16 > max_tokens:  # some tokens at the cut may differ
            raise ApiError(
                400,
                f"the text has {len(text)} characters and the model takes {max_tokens} tokens: shorten it",
                "context_length_exceeded",
                param="prompt",
            )
