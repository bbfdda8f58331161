"""Addresses and certificates: mistakes are told before the model is loaded, with the option's name."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from bifolio.cli.main import build_app
from bifolio.errors import ConfigError
from bifolio.serve.http import listening
from bifolio.serve.http.listening import bound_sockets, check_certificate, reserve
from cli_runner import CliRunner
from helpers import tiny_folder


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as other:  # as several front ends share a port
        yield other.getsockname()[1]


def refusal(*arguments: object) -> str:
    """The error of a server whose model does not exist: it comes first."""
    words = ["serve", "-m", "no-such-model", *map(str, arguments)]
    error = CliRunner().invoke(build_app(["serve"]), words).exception
    assert isinstance(error, ConfigError), repr(error)
    return str(error)


@pytest.mark.parametrize("front_ends", [1, 2])
def test_a_port_in_use_is_told_first(busy_port: int, front_ends: int) -> None:
    said = refusal("--port", busy_port, "--front-ends", front_ends)
    assert said == f"port {busy_port} is in use: pass --port with another one, or 0 for a free one"


@pytest.mark.parametrize("host", ["203.0.113.7", "no such host", "999.1.1.1"])
def test_a_host_of_no_network_here_is_told_first(host: str) -> None:
    assert f"--host {host} is no address of this machine: pass 127.0.0.1" in refusal("--host", host)


def test_a_missing_certificate_is_told_first(tmp_path: Path) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    assert refusal("--tls-cert", certificate) == "--tls-cert needs --tls-key: pass both, or none"
    assert refusal("--tls-key", key) == "--tls-key needs --tls-cert: pass both, or none"
    assert f"--tls-cert {certificate} cannot be read: No such file" in refusal(
        "--tls-cert", certificate, "--tls-key", key
    )
    certificate.write_text("no certificate")
    assert f"--tls-key {key} cannot be read: No such file" in refusal("--tls-cert", certificate, "--tls-key", key)
    key.write_text("no key")
    with pytest.raises(ConfigError, match="are not a certificate and its key"):
        check_certificate(certificate, key)


def test_ports_outside_the_range_are_refused() -> None:
    with pytest.raises(ConfigError, match="--port is a number from 0 to 65535, not 99999"):
        bound_sockets("127.0.0.1", 99999)


def test_a_reserved_port_refuses_clients_until_it_listens() -> None:
    (first, *others) = reserve("localhost", 0)
    try:
        port = first.getsockname()[1]
        assert {each.getsockname()[1] for each in others} <= {port}
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(first.getsockname()[:2], timeout=5)
        first.listen()
        socket.create_connection(first.getsockname()[:2], timeout=5).close()
    finally:
        for each in (first, *others):
            each.close()


def test_a_name_with_an_address_that_is_not_here_listens_on_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(int(socket.AF_INET6), ("2001:db8::1", 0, 0, 0)), (int(socket.AF_INET), ("127.0.0.1", 0))]
    monkeypatch.setattr(listening, "_addresses", lambda host, port: found)
    (bound,) = bound_sockets("here", 0)
    with bound:
        assert bound.getsockname()[0] == "127.0.0.1"
    found.pop()
    with pytest.raises(ConfigError, match="--host here is no address of this machine"):
        bound_sockets("here", 0)


@pytest.mark.full
def test_the_log_names_the_port_that_the_system_chose() -> None:
    command = [sys.executable, "-m", "bifolio", "serve", "-m", str(tiny_folder(tokenizer=True)), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        assert server.stdout is not None
        address = None
        try:
            for line in server.stdout:
                found = re.search(r"http://127\.0\.0\.1:(\d+)", line)
                if found is not None:
                    address = found.group()
                    break
            assert address is not None
            with urllib.request.urlopen(f"{address}/v1/models", timeout=30) as answer:
                assert json.load(answer)["data"]
        finally:
            server.send_signal(signal.SIGTERM)
            server.stdout.read()
