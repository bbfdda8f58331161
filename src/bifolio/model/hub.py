"""A client for the hub: lists a repository and downloads files, resumed and verified.

Standard library alone. `HF_ENDPOINT` names another server (a mirror), `HF_TOKEN` is sent to it for private models.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import socket
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from bifolio.errors import ConfigError, ModelFileError

ENDPOINT = "https://huggingface.co"
CONNECT_SECONDS = 2.5  # to know that there is no network
READ_SECONDS = 30.0
MAX_TRIES = 5  # of a download that breaks off; each goes on where the last one ended
CHUNK = 1 << 20

Progress = Callable[[int, int], None]  # (bytes so far, bytes in all)


class HubFile(NamedTuple):
    """A file of a repository."""

    path: str
    size: int
    sha256: str | None  # of large files
    git_sha1: str | None  # of the others: the digest of a git blob


def endpoint() -> str:
    return (os.environ.get("HF_ENDPOINT") or ENDPOINT).rstrip("/")


def list_files(repository: str) -> list[HubFile]:
    """Every file of a repository; ModelFileError says why there is no list."""
    require_connection(endpoint())
    url: str | None = f"{endpoint()}/api/models/{repository}/tree/main?recursive=true"
    files: list[HubFile] = []
    while url is not None:
        with _open(url, repository) as answer:
            entries = _parsed(answer.read(), url)
            url = _next_page(answer.headers.get("Link"))
        files += [_file(entry) for entry in entries if entry.get("type") == "file"]
    return files


def download(repository: str, file: HubFile, target: Path, progress: Progress = lambda done, total: None) -> None:
    """Fetch a file and verify its digest. A part that is there already is continued; it stays when this breaks off."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.{(file.sha256 or file.git_sha1 or 'unknown')[:16]}.part")
    url = f"{endpoint()}/{repository}/resolve/main/{urllib.parse.quote(file.path)}"
    for number in range(MAX_TRIES):
        before = part.stat().st_size if part.exists() else 0
        if before == file.size:
            break
        try:
            _append(url, repository, part, file, progress)
        except (OSError, http.client.HTTPException) as error:
            have = part.stat().st_size if part.exists() else 0
            if have <= before or number == MAX_TRIES - 1:
                raise ModelFileError(
                    f"{file.path} could not be fetched: the connection broke after {have} of {file.size} bytes "
                    f"({_first_line(error)}); the same command goes on from there"
                ) from error
    _verify(part, file)
    os.replace(part, target)


def require_connection(url: str) -> None:
    """Raise ModelFileError within 3 seconds where the server behind a URL (or the proxy before it) is out of reach."""
    if not can_connect(url):
        host = urllib.parse.urlsplit(url).hostname
        raise ModelFileError(f"no connection to {host}: check the network, or set HF_ENDPOINT to a mirror")


def can_connect(url: str) -> bool:
    """Whether a connection is made in time; the resolver of names may take longer, so it runs on a thread."""
    parts = urllib.parse.urlsplit(url)
    proxy = urllib.request.getproxies().get(parts.scheme)
    if proxy and parts.hostname and not urllib.request.proxy_bypass(parts.hostname):
        parts = urllib.parse.urlsplit(proxy if "//" in proxy else f"//{proxy}")
    address = (parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80))
    connected = threading.Event()

    def connect() -> None:
        try:
            socket.create_connection(address, timeout=CONNECT_SECONDS).close()
            connected.set()
        except OSError:
            pass

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(CONNECT_SECONDS)
    return connected.is_set()


# -- details ---------------------------------------------------------------------------------------------------------


class _Redirect(urllib.request.HTTPRedirectHandler):
    """Follows redirects without handing the token to another host."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        new = super().redirect_request(req, fp, code, msg, headers, newurl)
        if new is not None and urllib.parse.urlsplit(newurl).hostname != urllib.parse.urlsplit(req.full_url).hostname:
            new.remove_header("Authorization")
        return new


def _open(url: str, repository: str, start: int = 0) -> Any:
    headers = {"User-Agent": "bifolio"}
    if token := os.environ.get("HF_TOKEN"):
        headers["Authorization"] = f"Bearer {token}"
    if start:
        headers["Range"] = f"bytes={start}-"
    try:
        opener = urllib.request.build_opener(_Redirect)
        return opener.open(urllib.request.Request(url, headers=headers), timeout=READ_SECONDS)
    except urllib.error.HTTPError as error:
        raise ModelFileError(f"hf:{repository} could not be fetched: {_reason(error)}") from error
    except urllib.error.URLError as error:
        raise ModelFileError(f"hf:{repository} could not be fetched: {_first_line(error)}") from error


def _reason(error: urllib.error.HTTPError) -> str:
    host = urllib.parse.urlsplit(error.url or "").hostname
    if error.code == 404:
        return f"{host} has no such repository or file"
    if error.code in (401, 403):
        return f"{host} does not allow it: the model may be private, or set HF_TOKEN to a token that may read it"
    return f"{host} answered {error.code} {error.reason}"


def _append(url: str, repository: str, part: Path, file: HubFile, progress: Progress) -> None:
    """Continue a part until the file is whole or the connection breaks."""
    start = part.stat().st_size if part.exists() else 0
    with _open(url, repository, start) as answer:
        if start and answer.status != 206:  # a server that cannot continue sends the whole file
            start = 0
        with part.open("ab" if start else "wb") as output:
            done = start
            while chunk := answer.read(CHUNK):
                output.write(chunk)
                done += len(chunk)
                progress(done, file.size)
    if done < file.size:
        raise ConnectionError("the server closed it")


def _verify(part: Path, file: HubFile) -> None:
    """Compare the digest of a complete part with the one of the hub's list; a part that differs is deleted."""
    if file.sha256 is not None:
        digest, wanted, name = hashlib.sha256(), file.sha256, "SHA-256"
    elif file.git_sha1 is not None:
        digest, wanted, name = hashlib.sha1(usedforsecurity=False), file.git_sha1, "git SHA-1"
        digest.update(b"blob %d\0" % part.stat().st_size)
    else:
        return
    with part.open("rb") as source:
        while chunk := source.read(CHUNK):
            digest.update(chunk)
    if digest.hexdigest() != wanted:
        part.unlink()
        raise ModelFileError(f"{file.path} has the {name} {digest.hexdigest()} instead of {wanted}: it was not kept")


def _parsed(data: bytes, url: str) -> list[dict[str, Any]]:
    try:
        entries = json.loads(data)
    except ValueError as error:
        raise ModelFileError(f"{url} did not answer with JSON: {error}") from error
    if not isinstance(entries, list):
        raise ModelFileError(f"{url} did not answer with a list of files")
    return [entry for entry in entries if isinstance(entry, dict)]


def _file(entry: dict[str, Any]) -> HubFile:
    path, lfs = str(entry.get("path", "")), entry.get("lfs")
    if path.startswith("/") or ".." in path.split("/") or "\\" in path:
        raise ConfigError(f"the hub lists a file {path!r}, which would lead out of the model's folder")
    large: dict[str, Any] = lfs if isinstance(lfs, dict) else {}
    return HubFile(path, int(large.get("size") or entry.get("size") or 0), large.get("oid"),
                   None if large else entry.get("oid"))  # fmt: skip


def _next_page(link: str | None) -> str | None:
    """The address of a `Link: <...>; rel="next"` header."""
    if link is None or 'rel="next"' not in link:
        return None
    return link.split("<", 1)[1].split(">", 1)[0]


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
