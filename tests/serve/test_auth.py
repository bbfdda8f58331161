"""Keys: every route is guarded, whatever the request looks like; tenants do not see each other's cache."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from serving import RunningServer, running_server

from bifolio.errors import ConfigError
from bifolio.serve.http.app import ROUTES
from bifolio.serve.http.auth import KeyRing, read_keys
from bifolio.serve.page import page_files

KEYS = ["first-secret-key", "second-secret-key"]
OPEN = {"/health", "/ready", "/kv_transfer"}  # the last says on which port a prefill engine serves blocks


@pytest.fixture(scope="module")
def guarded() -> Iterator[RunningServer]:
    with running_server(keys=KEYS) as server:
        yield server


def every_route(server: RunningServer) -> list[tuple[str, str]]:
    """(method, path) of the routes that the application really has."""
    app: Any = server.server.config.app
    found = [(method, route.path) for route in app.routes for method in route.methods]
    assert len(found) >= len(ROUTES) + 1
    return found


def check_shape(path: str, body: Any) -> None:
    """The error has the shape of the protocol of its path."""
    error = body["error"]
    if path.startswith("/v1/messages"):
        assert (body["type"], error["type"]) == ("error", "authentication_error")
    elif path.startswith("/api/"):
        assert "valid key" in error
    elif path in ("/completion", "/infill", "/props", "/slots"):
        assert error["code"] == 401
    else:
        assert error["code"] == "invalid_api_key"


def test_a_key_of_anthropic_clients(guarded: RunningServer) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
    with guarded.http() as http:
        for key, status in (("first-secret-key", 200), ("wrong-secret-key", 401), ("", 401)):
            answer = http.post("/v1/messages/count_tokens", json=body, headers={"x-api-key": key})
            assert answer.status_code == status
        both = {"x-api-key": "first-secret-key", "authorization": "Bearer wrong"}
        assert http.post("/v1/messages/count_tokens", json=body, headers=both).status_code == 401


@pytest.mark.full
def test_every_route_but_the_open_ones_answers_401_without_a_key(guarded: RunningServer) -> None:
    open_paths = OPEN | set(page_files())
    with guarded.http() as http:
        for method, path in every_route(guarded):
            answer = http.request(method, path.replace("{name:path}", "tiny").replace("{id}", "resp_1"))
            assert (answer.status_code == 401) == (path not in open_paths), (method, path, answer.status_code)
            if answer.status_code == 401:
                assert answer.headers["www-authenticate"] == "Bearer"
                if method != "HEAD":
                    check_shape(path, answer.json())
        for path in ("/nothing", "/v1", "/metrics/", "/page", "/page/none.js", "/page/../metrics", "/health/"):
            assert http.get(path).status_code == 401, path
        assert http.post("/health").status_code == 401  # only looking is free
        assert http.options("/v1/completions").status_code == 401


@pytest.mark.full
@pytest.mark.parametrize(
    "headers",
    [
        {"host": "localhost"},
        {"host": "127.0.0.1:1"},
        {"host": "health"},
        {"host": ""},
        {"x-forwarded-for": "127.0.0.1", "x-forwarded-host": "localhost", "x-real-ip": "127.0.0.1"},
        {"forwarded": "for=127.0.0.1;host=localhost"},
        {"x-original-url": "/health", "x-rewrite-url": "/health"},
        {"authorization": ""},
        {"authorization": "Bearer"},
        {"authorization": "Basic Zmlyc3Qtc2VjcmV0LWtleQ=="},
        {"authorization": "Bearer wrong"},
        {"authorization": "Bearer first-secret-ke"},
        {"authorization": "Bearer first-secret-keyy"},
        {"authorization": "Bearer FIRST-SECRET-KEY"},
        {"authorization": "first-secret-key"},
        {"x-api-key": "first-secret-key"},
        {"cookie": "authorization=Bearer first-secret-key"},
    ],
)
def test_tricks_do_not_help(guarded: RunningServer, headers: dict[str, str]) -> None:
    with guarded.http() as http:
        assert http.get("/metrics", headers=headers).status_code == 401
        assert http.post("/v1/completions", headers=headers, json={"prompt": "x"}).status_code == 401


def test_raw_requests_do_not_help(guarded: RunningServer) -> None:
    """Absolute targets, two headers, and encodings that clients do not send."""
    key = KEYS[0]
    for request in (
        b"GET http://127.0.0.1/metrics HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /metrics HTTP/1.0\r\n\r\n",
        b"GET /%6detrics HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health/%2e%2e/metrics HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health?/../metrics HTTP/1.1\r\nHost: x\r\n\r\n",
        f"GET /metrics HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nAuthorization: Bearer no\r\n\r\n".encode(),
    ):
        with socket.create_connection(("127.0.0.1", guarded.port), timeout=20) as connection:
            connection.sendall(request)
            answer = connection.recv(65536)
        assert b"num_requests_running" not in answer, request
        if b"/health?" not in request:
            assert b" 401 " in answer.split(b"\r\n")[0], request


def test_a_key_lets_in(guarded: RunningServer) -> None:
    for key in KEYS:
        assert guarded.client(key).models.list().data[0].id == "tiny"
    with pytest.raises(openai.AuthenticationError):
        guarded.client("wrong").models.list()


@pytest.mark.full
def test_tenants_do_not_share_cached_prefixes(guarded: RunningServer) -> None:
    prompt = [9 + number % 70 for number in range(80)]

    def cached(key: str) -> int:
        answer = guarded.client(key).completions.create(model="tiny", prompt=prompt, max_tokens=1)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    assert [cached(KEYS[0]), cached(KEYS[1])] == [0, 0]
    assert [cached(KEYS[0]), cached(KEYS[1])] == [72, 72]


def test_keys_from_files(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# comment\n\n  a-good-key-1 \na-good-key-2\n")
    assert read_keys(["on-the-command-line"], [file]) == ["on-the-command-line", "a-good-key-1", "a-good-key-2"]
    file.write_text("\n")
    for keys, files in ((["short"], []), (["with space key"], []), ([], [file]), ([], [tmp_path / "missing"])):
        with pytest.raises(ConfigError):
            read_keys(keys, files)


def test_no_keys_let_everybody_in() -> None:
    assert KeyRing().find(None) is not None
    ring = KeyRing(["a-good-key-1"])
    assert ring.find(None) is None
    assert ring.find(b"Bearer a-good-key-1") is not None
    assert ring.find(b"bearer   a-good-key-1") is not None
    assert ring.find(b"Bearer " + b"x" * 10**6) is None


@pytest.mark.full
def test_cors_is_off_unless_asked_for(guarded: RunningServer) -> None:
    headers = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    with guarded.http() as http:
        for answer in (http.options("/v1/completions", headers=headers), http.get("/health", headers=headers)):
            assert "access-control-allow-origin" not in answer.headers
