"""TLS: answers, and connections that never end their handshake."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from serving import RunningServer, running_server

from bifolio.serve.http import tls_doors
from bifolio.serve.http.connection import Connections
from bifolio.serve.http.tls_doors import TlsDoors, tls_context

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = folder / "cert.pem", folder / "key.pem"
    made = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
         "-keyout", str(key), "-out", str(certificate), "-days", "1", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"],
        capture_output=True, check=False,
    )  # fmt: skip
    if made.returncode:
        pytest.skip("openssl cannot make a certificate here")
    return certificate, key


def client(server: RunningServer, certificate: Path) -> httpx.Client:
    trust = ssl.create_default_context(cafile=str(certificate))
    return httpx.Client(verify=trust, base_url=f"https://127.0.0.1:{server.port}", timeout=30)


def test_tls(files: tuple[Path, Path]) -> None:
    certificate, key = files
    with running_server(tls_certificate=certificate, tls_key=key) as server:
        with client(server, certificate) as http:
            assert http.get("/ready").status_code == 200
            answer = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2})
            assert answer.status_code == 200
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"http://127.0.0.1:{server.port}/ready")


@contextlib.contextmanager
def silent(port: int, address: str, count: int) -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as held:
        yield [
            held.enter_context(socket.create_connection(("127.0.0.1", port), 20, source_address=(address, 0)))
            for _ in range(count)
        ]


def num_closed(connections: list[socket.socket]) -> int:
    """Connections that the server has ended."""
    count = 0
    for one in connections:
        one.setblocking(False)
        try:
            count += one.recv(1) == b""
        except BlockingIOError:
            pass
        except ConnectionError:
            count += 1
    return count


def wait_closed(connections: list[socket.socket], count: int, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while (found := num_closed(connections)) != count:
        assert time.monotonic() < end, found
        time.sleep(0.01)


def test_silent_connections_make_room_and_have_a_time_limit(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, key = files
    limits = {"max_connections": 32, "max_connections_per_address": 16}
    with running_server(tls_certificate=certificate, tls_key=key, **limits) as server:
        with silent(server.port, "127.0.0.2", 40) as many, client(server, certificate) as http:
            wait_closed(many, 24)  # more than one address may have
            assert http.get("/ready").status_code == 200
        monkeypatch.setattr(tls_doors, "HANDSHAKE_SECONDS", 0.3)
        with silent(server.port, "127.0.0.2", 8) as few:
            wait_closed(few, 8)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_request_with_the_end_of_the_handshake_is_not_lost(files: tuple[Path, Path], loop: str) -> None:
    factory = asyncio.new_event_loop if loop == "asyncio" else pytest.importorskip("uvloop").new_event_loop

    class Echo(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.transport = transport

        def data_received(self, data: bytes) -> None:
            self.transport.write(data.upper())  # type: ignore[attr-defined]

    async def exchange() -> list[bytes]:
        connections = Connections(8, 8)
        doors, listener = TlsDoors(tls_context(*files), connections), socket.create_server(("127.0.0.1", 0))
        doors.listen([listener], Echo)
        port = listener.getsockname()[1]
        trust = ssl.create_default_context(cafile=str(files[0]))
        answers = []
        for _ in range(5):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trust)
            writer.write(b"at once")
            answers.append(await reader.readexactly(7))
            writer.close()
        assert not connections._open
        reader, writer = await asyncio.open_connection("127.0.0.1", port)  # no TLS
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()
        assert not connections._open
        doors.close()
        await doors.wait_closed()
        listener.close()
        return answers

    with asyncio.Runner(loop_factory=factory) as runner:
        assert runner.run(asyncio.wait_for(exchange(), 30)) == [b"AT ONCE"] * 5
