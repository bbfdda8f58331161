"""Images as a model reads them, each once: a repeated image costs the digest of its pixels."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from threading import Lock
from typing import Any

from bifolio.model.vision.decoding import decoded, pixels_of
from bifolio.model.vision.tower import Picture, Vision

MOST_BYTES = 64 << 20  # of the pixels of known pictures; the last one is kept even if it is larger
MOST_THREADS = 8  # decoding and resizing release the interpreter


class Pictures:
    """The pictures of the images that were read last, by the digest of their pixels; any thread may call it."""

    def __init__(self, vision: Vision, most_bytes: int = MOST_BYTES) -> None:
        self.vision = vision
        self._most_bytes, self._num_bytes = most_bytes, 0
        self._known: OrderedDict[bytes, Picture] = OrderedDict()
        self._lock = Lock()

    def read(self, image: Any) -> Picture:
        """The picture of a `PIL.Image`, u8[height, width, 3], or the bytes of a file."""
        if isinstance(image, bytes):
            key = file_key(image, "")
            return self.known(key) or self.put(key, self.vision.picture(pixels_of(decoded(image))))
        pixels = pixels_of(image)
        key = blake2b(pixels.data, digest_size=16, salt=_words(pixels.shape[:2])).digest()
        found = self.known(key)
        if found is None:
            found = self.put(key, self.vision.picture(pixels))
        return found

    def read_all(self, images: Sequence[Any]) -> list[Picture]:
        """The pictures of several images, on several threads."""
        count = min(len(images), MOST_THREADS, os.cpu_count() or 1)
        if count < 2:
            return [self.read(image) for image in images]
        with ThreadPoolExecutor(count, thread_name_prefix="bifolio-images") as pool:
            return list(pool.map(self.read, images))

    def known(self, key: bytes) -> Picture | None:
        """The picture under a key; None: it was not put, or others have taken its place."""
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
            return self._known.get(key)

    def put(self, key: bytes, picture: Picture) -> Picture:
        """Keep a picture under a key; it is returned with the digests of its tiles."""
        picture = picture._replace(digests=tuple(self.vision.digest(tile) for tile in picture.tiles))
        with self._lock:
            if key not in self._known:
                self._known[key] = picture
                self._num_bytes += _bytes_of(picture)
            while self._num_bytes > self._most_bytes and len(self._known) > 1:
                self._num_bytes -= _bytes_of(self._known.popitem(last=False)[1])
        return picture


def file_key(data: bytes, owner: str) -> bytes:
    """The key of the picture of a file. Whether a picture is known takes less time: others may not see it."""
    found = blake2b(owner.encode(), digest_size=16, person=b"bifolio-file")
    found.update(b"\0")
    found.update(data)
    return found.digest()


def _words(numbers: Iterable[int]) -> bytes:
    return b"".join(number.to_bytes(8, "little") for number in numbers)


def _bytes_of(picture: Picture) -> int:
    return sum(tile.nbytes for tile in picture.tiles)
