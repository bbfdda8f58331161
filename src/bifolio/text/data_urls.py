"""Data URLs of images."""

from __future__ import annotations

import base64
import binascii
import re

from bifolio.errors import RequestError

DATA_URL = re.compile(r"data:(?:image/[\w.+-]+)?(?:;[\w=.+-]+)*;base64,", re.ASCII | re.IGNORECASE)


def data_of(url: str) -> bytes:
    """The bytes of a data URL."""
    head = DATA_URL.match(url)
    if head is None:
        raise RequestError(f"the url of an image is {url[:40]!r}: pass the image itself, as data:image/png;base64,...")
    try:
        return base64.b64decode(url[head.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"the data of an image is not base64: {error}") from error


def url_of(data: bytes) -> str:
    """A data URL with these bytes of an image; readers go by the bytes."""
    return "data:image/png;base64," + base64.b64encode(data).decode()
