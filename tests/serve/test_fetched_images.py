"""Images by URL: fetched from allowed hosts alone, in bounded time and memory, and never from private addresses."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest
from serving import running_server
from test_images import answer_of, encoded, requests_of, user

from bifolio.errors import ConfigError, RequestError
from bifolio.serve.http import fetched_images
from bifolio.serve.http.context import Limits
from bifolio.serve.http.fetched_images import checked_hosts, fetched, source_of
from vision.vision_models import gemma3_model, picture


class Handler(BaseHTTPRequestHandler):
    """Answers by path."""

    bodies: ClassVar[dict[str, bytes]] = {}
    asked: ClassVar[list[str]] = []
    elsewhere = ""

    def do_GET(self) -> None:
        type(self).asked.append(self.path)
        with contextlib.suppress(OSError):
            self.answer()

    def answer(self) -> None:
        if self.path.startswith("/to/"):
            self.send_response(302)
            self.send_header("Location", {"loop": "/to/loop", "in": "/image.png"}.get(self.path[4:], self.elsewhere))
            self.end_headers()
        elif self.path == "/large":
            self.send_response(200)
            self.end_headers()
            for _ in range(40):
                self.wfile.write(bytes(1 << 20))
        elif self.path == "/slow":
            self.send_response(200)
            self.end_headers()
            for _ in range(100):
                self.wfile.write(b"x")
                time.sleep(0.05)
        elif self.path == "/part":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b"x")
        elif self.path in self.bodies:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(self.bodies[self.path])
        else:
            self.send_error(404)

    def log_message(self, *arguments: Any) -> None: ...


@pytest.fixture
def host() -> Iterator[str]:
    """An address with its port, whose images are answered."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Handler.bodies, Handler.asked = {"/image.png": b"pixels", "/a%20b?c=d": b"query"}, []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def get(url: str, *hosts: str) -> bytes:
    return asyncio.run(fetched(url, hosts))


def test_images_of_allowed_hosts(host: str) -> None:
    assert get(f"http://{host}/image.png", "example.org", host) == b"pixels"
    assert get(f"HTTP://{host}/a b?c=d#there", host) == b"query"
    assert get(f"http://{host}/to/in", host) == b"pixels"


def test_refusals_name_their_reason(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetched_images, "SECONDS", 0.6)
    port, own = host.rpartition(":")[2], (host,)
    Handler.elsewhere = f"http://localhost:{port}/image.png"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        closed = f"127.0.0.1:{free.getsockname()[1]}"
    for url, hosts, said in (
        (f"http://{host}/none", own, "answered 404 for an image"),
        (f"http://{host}/large", own, "has more than 33554432 bytes"),
        (f"http://{host}/slow", own, "took more than 1 seconds"),
        (f"http://{host}/part", own, "sent a part of the image|IncompleteRead"),
        (f"http://{host}/to/loop", own, "leads to more than 3 others"),
        (f"http://{host}/to/other", own, "images of the host 'localhost:[0-9]+' are not allowed here"),
        (f"http://{host}/to/other", (*own, f"localhost:{port}"), "has a private address"),
        (f"http://localhost:{port}/image.png", (f"localhost:{port}",), "has a private address"),
        (f"http://{host}/image.png", ("127.0.0.1",), "are not allowed here"),
        (f"http://{host}/image.png", (), "are not allowed here"),
        (f"http://user@{host}/image.png", own, "without a user"),
        (f"http://{host}/\r\nX: y", own, "without a user or other signs"),
        ("http://[::1/image.png", own, "pass http or https"),
        ("ftp://127.0.0.1/image.png", ("127.0.0.1",), "pass http or https"),
        (f"http://{host}/{'a' * 3000}", own, "3[0-9]+ characters and 2048 are allowed"),
        (f"https://{host}/image.png", own, "could not be fetched"),
        (f"http://{closed}/image.png", (closed,), "could not be fetched"),
        ("http://no-such-host.invalid/image.png", ("no-such-host.invalid",), "could not be fetched|took more"),
    ):
        with pytest.raises(RequestError, match=said):
            get(url, *hosts)
    assert not any(path.startswith("/image") for path in Handler.asked)


def test_private_addresses_behind_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """One private address among public ones is enough; names of public addresses pass."""
    addresses: list[str] = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(0, 0, 0, "", (each, 80)) for each in addresses])
    source = source_of("http://example.org/a.png", ["EXAMPLE.org"])
    for private in ("127.0.0.1", "10.1.2.3", "169.254.169.254", "192.168.0.1", "::1", "fd00::1", "fe80::1%eth0",
                    "::ffff:10.0.0.1", "0.0.0.0", "224.0.0.1", "100.64.0.1"):  # fmt: skip
        addresses[:] = ["93.184.216.34", private]
        with pytest.raises(RequestError, match="private address"):
            fetched_images.address_of(source)
    addresses[:] = ["93.184.216.34", "2606:2800:220:1:248:1893:25c8:1946"]
    assert fetched_images.address_of(source) == "93.184.216.34"


def test_hosts_of_the_option() -> None:
    assert checked_hosts(["a.org", "A.org:8080", "[::1]:80", "10.0.0.1"]) == ("a.org", "a.org:8080", "[::1]:80",
                                                                           "10.0.0.1")  # fmt: skip
    for wrong in ("", "*", "*.org", "http://a.org", "a.org/path", "a.org:x", "u@a.org"):
        with pytest.raises(ConfigError, match="--allow-image-urls takes a HOST"):
            checked_hosts([wrong])


@pytest.mark.full
def test_every_protocol_with_urls_reads_them(host: str) -> None:
    image, text = picture(70, 30, 4), "What is it?"
    import base64

    Handler.bodies["/fox.png"] = base64.b64decode(encoded(image))
    Handler.bodies["/text"] = b"no image"
    engine = {"model": str(gemma3_model().folder), "kernels": "native", "max_model_len": 256, "num_blocks": 200}
    url = f"http://{host}/fox.png"
    with running_server(engine=engine, limits=Limits(image_hosts=(host,))) as running, running.http() as client:
        inline = requests_of(encoded(image), text)
        path, body = inline["chat"]
        expected = answer_of("chat", client.post(path, json=body).json())
        by_url = {
            "chat": (path, {**body, **user({"type": "image_url", "image_url": {"url": url}},
                                           {"type": "text", "text": text})}),
            "anthropic": ("/v1/messages", {**inline["anthropic"][1], **user(
                {"type": "image", "source": {"type": "url", "url": url}}, {"type": "text", "text": text})}),
        }  # fmt: skip
        for name, (path, body) in by_url.items():
            reply = client.post(path, json=body)
            assert reply.status_code == 200, reply.text
            assert answer_of(name, reply.json()).strip() == expected.strip()
        for wrong, said in (("text", "is none of PNG, JPEG"), ("none", "answered 404")):
            wanted = user({"type": "image_url", "image_url": {"url": f"http://{host}/{wrong}"}})
            reply = client.post("/v1/chat/completions", json=wanted)
            assert reply.status_code == 400
            assert said in reply.json()["error"]["message"]
