"""The web page: plain files, served as they are."""

from __future__ import annotations

from importlib.resources import files

TYPES = {
    "html": b"text/html; charset=utf-8",
    "css": b"text/css; charset=utf-8",
    "js": b"text/javascript; charset=utf-8",
    "svg": b"image/svg+xml",
}


def page_files() -> dict[str, tuple[bytes, bytes]]:
    """Path → (content, type). `/` is index.html."""
    found = {}
    for entry in files(__package__).iterdir():
        suffix = entry.name.rpartition(".")[2]
        if suffix in TYPES:
            path = "/" if entry.name == "index.html" else f"/page/{entry.name}"
            found[path] = (entry.read_bytes(), TYPES[suffix])
    return found
