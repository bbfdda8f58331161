"""Images that were made to do harm, and the sentence that each is answered with."""

from __future__ import annotations

import base64
import io
import json
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import PIL.Image


@dataclass(frozen=True)
class ImageBomb:
    """A request with images, and a pattern of its error."""

    make: Callable[[], list[str]]  # URLs
    said: str = ""  # "": the image is read as any other
    may_be_read: bool = False  # within the limits on time and memory, which depend on the machine

    def content(self) -> bytes:
        parts = [{"type": "image_url", "image_url": {"url": url}} for url in self.make()]
        text = [{"type": "text", "text": "What is it?"}]
        messages = [{"role": "user", "content": [*parts, *text]}]
        return json.dumps({"messages": messages, "max_tokens": 2, "temperature": 0}).encode()


def url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, depth: int, colour: int, row_bytes: int, extra: bytes = b"") -> bytes:
    """A black image whose rows are zeros: a thousandth of its size in memory."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    packed, rows = zlib.compressobj(9), bytes(64 * (1 + row_bytes))
    parts = [packed.compress(rows[: min(64, height - row) * (1 + row_bytes)]) for row in range(0, height, 64)]
    pixels = b"".join([*parts, packed.flush()])
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + extra + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def small(kind: str = "PNG") -> bytes:
    data = io.BytesIO()
    PIL.Image.new("RGB", (40, 30), (200, 10, 10)).save(data, kind)
    return data.getvalue()


def frames(count: int) -> bytes:
    """A GIF of so many frames of one pixel."""
    head = b"GIF89a" + struct.pack("<HHBBB", 8, 8, 0x80, 0, 0) + bytes(6)
    frame = b",\x00\x00\x00\x00\x01\x00\x01\x00\x00\x02\x02D\x01\x00"
    return head + frame * count + b";"


def text_bomb() -> bytes:
    """A compressed text of 200 MB beside the pixels."""
    packed = zlib.compressobj(9)
    text = b"".join(packed.compress(bytes(1 << 20)) for _ in range(200)) + packed.flush()
    return png(8, 8, 8, 2, 24, chunk(b"zTXt", b"Comment\0\0" + text))


DAMAGED, FORMAT = "the image is damaged", "the image is none of PNG, JPEG, WEBP, GIF"
SLOW = "the image takes too much (time or )?memory"
BOMBS = {
    "50,000 x 50,000 pixels": ImageBomb(
        lambda: [url(png(50_000, 50_000, 1, 0, 6250))], "50000 x 50000 pixels|too large"
    ),
    "64 million pixels": ImageBomb(lambda: [url(png(8191, 8191, 8, 6, 4 * 8191))], SLOW, True),
    "a thin line": ImageBomb(lambda: [url(png(100_000, 1, 1, 0, 12_500))], "100000 x 1 pixels"),
    "10,000 frames": ImageBomb(lambda: [url(frames(10_000), "image/gif")]),
    "truncated": ImageBomb(lambda: [url(small()[:70])], DAMAGED),
    "a truncated JPEG": ImageBomb(lambda: [url(small("JPEG")[:300], "image/jpeg")], f"{DAMAGED}|{FORMAT}"),
    "compressed text": ImageBomb(lambda: [url(text_bomb())], f"{DAMAGED}|{FORMAT}|{SLOW}", True),
    "a page behind the pixels": ImageBomb(lambda: [url(small() + b"<script>alert(1)</script>PK\x03\x04")]),
    "a script called GIF": ImageBomb(
        lambda: [url(b"GIF89a/*" + b"a" * 400 + b"*/=1;", "image/gif")], f"{DAMAGED}|{FORMAT}"
    ),
    "SVG": ImageBomb(
        lambda: [url(b'<svg xmlns="http://www.w3.org/2000/svg"><script/></svg>', "image/svg+xml")], FORMAT
    ),
    "a PDF": ImageBomb(lambda: [url(b"%PDF-1.7\n1 0 obj\n", "image/png")], FORMAT),
    "another type than it says": ImageBomb(lambda: [url(small("JPEG"), "image/png")]),
    "no image type": ImageBomb(lambda: [url(small(), "text/html")], "pass the image itself"),
    "a file": ImageBomb(lambda: ["file:///etc/passwd"], "pass the image itself"),
    "an address of the machine": ImageBomb(lambda: ["http://127.0.0.1:22/"], "pass the image itself"),
    "1,000 images": ImageBomb(lambda: [url(small())] * 1000, "has 1000 images and 256 are allowed"),
    "100 images": ImageBomb(lambda: [url(small())] * 100, "tokens"),
    "no bytes": ImageBomb(lambda: [url(b"")], FORMAT),
}
