"""A hub on this machine: the addresses that `bifolio pull` asks for, answered from a dictionary."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Repositories by name, files by path; `cut_after` bytes the connection of a download breaks."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.cut_after: int | None = None
        self.corrupt = False  # send a wrong byte
        self.ranges: list[str | None] = []  # of every download


@contextmanager
def local_hub() -> Iterator[Hub]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub = Hub(f"http://127.0.0.1:{server.server_port}")
    server.hub = hub  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)  # seconds between its polls
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def log_message(self, *arguments: object) -> None:
        pass

    def answer(self) -> None:
        hub: Hub = self.server.hub  # type: ignore[attr-defined]
        path = self.path.split("?")[0]
        for name, files in hub.repositories.items():
            if path.startswith(f"/api/models/{name}"):
                return self.send_json(self.listing(path, name, files))
            for commit in ("main", COMMIT):
                prefix = f"/{name}/resolve/{commit}/"
                if path.startswith(prefix) and path.removeprefix(prefix) in files:
                    return self.send_file(hub, files[path.removeprefix(prefix)])
        self.send_response(404)
        self.send_header("Content-Length", "0")
        return self.end_headers()

    def listing(self, path: str, name: str, files: dict[str, bytes]) -> object:
        if "/tree/" in path:
            return [entry(path, data) for path, data in files.items()]
        return {"id": name, "sha": COMMIT, "siblings": [{"rfilename": file} for file in files]}

    def send_json(self, value: object) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def send_file(self, hub: Hub, data: bytes) -> None:
        wanted = self.headers.get("Range")
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted else 0
        self.send_response(206 if start else 200)
        self.send_header("ETag", f'"{digest(data)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        if self.command != "GET":
            return
        hub.ranges.append(wanted)
        if hub.corrupt:
            data = data[:-1] + bytes([data[-1] ^ 1])
        if hub.cut_after is not None:
            self.wfile.write(data[start : start + hub.cut_after])
            self.wfile.flush()
            self.close_connection = True
            self.connection.close()
            return
        self.wfile.write(data[start:])


def entry(path: str, data: bytes) -> dict[str, object]:
    """A file in the list of a repository; large ones have a SHA-256, all have the digest of a git blob."""
    found: dict[str, object] = {"type": "file", "path": path, "size": len(data), "oid": digest(data)}
    if path.endswith((".gguf", ".safetensors")):
        found["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data)}
    return found


def digest(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
