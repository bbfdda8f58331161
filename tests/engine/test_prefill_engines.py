"""The choice of a prefill engine: configured addresses in turn, silent servers, and addresses of clients."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest

from bifolio.config.transfer import Address, TransferSettings
from bifolio.engine.transfer import prefill_engines
from bifolio.engine.transfer.decode import Fetched
from bifolio.engine.transfer.prefill_engines import PrefillEngines, RoutedPrefillEngines
from bifolio.errors import ConfigError


class Info(BaseHTTPRequestHandler):
    """A prefill server that says where its blocks are."""

    answers: dict[int, Any] = {}  # noqa: RUF012 - by the port of the server

    def do_GET(self) -> None:
        body = json.dumps(self.answers[self.server.server_address[1]]).encode()  # type: ignore[index]
        self.send_response(200 if self.path == "/kv_transfer" else 404)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Write no log."""


@pytest.fixture
def servers() -> Iterator[list[str]]:
    """Two HTTP addresses, whose blocks are at ports 7001 and 7002."""
    made = [ThreadingHTTPServer(("127.0.0.1", 0), Info) for _ in range(2)]
    for number, server in enumerate(made):
        Info.answers[server.server_address[1]] = {"remote_port": 7001 + number}
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield [f"127.0.0.1:{server.server_address[1]}" for server in made]
    for server in made:
        server.shutdown()
        server.server_close()


class Fetches:
    """In place of the fetcher: records addresses."""

    def __init__(self) -> None:
        self.addresses: list[Address] = []
        self.secrets: list[str | None] = []
        self.is_whole, self.num_blocks = True, 3

    def fetch(self, address: Address, token_ids: Any, salt: bytes, secret: str | None = None) -> Fetched:
        self.addresses.append(address)
        self.secrets.append(secret)
        return Fetched(self.num_blocks, self.is_whole)


@pytest.fixture
def fetches(monkeypatch: pytest.MonkeyPatch) -> Fetches:
    made = Fetches()
    monkeypatch.setattr(prefill_engines, "BlockFetcher", lambda calls, sizes, secret="", threshold=1: made)
    return made


def engines(addresses: list[str]) -> PrefillEngines:
    nothing: Any = None
    return PrefillEngines(nothing, nothing, TransferSettings("decode", prefill_addresses=tuple(addresses)))


def test_engines_take_turns(servers: list[str], fetches: Fetches) -> None:
    chosen = engines(servers)
    assert [chosen.fetch([1] * 99, b"") for _ in range(4)] == [3] * 4
    assert [address.port for address in fetches.addresses] == [7001, 7002, 7001, 7002]


def test_a_server_that_does_not_answer_is_left_out(servers: list[str], fetches: Fetches) -> None:
    chosen = engines(["127.0.0.1:9", servers[1]])
    for _ in range(3):
        chosen.fetch([1] * 99, b"")
    assert [address.port for address in fetches.addresses] == [7002] * 3
    assert engines(["127.0.0.1:9"]).fetch([1] * 99, b"") == 0


def test_a_gateway_chooses_among_configured_servers(servers: list[str], fetches: Fetches) -> None:
    chosen = engines(servers)
    assert chosen.fetch([1], b"", servers[1]) == 3
    assert chosen.fetch([1], b"", "kv:127.0.0.1:7002") == 3
    assert [address.port for address in fetches.addresses] == [7002, 7002]


@pytest.mark.parametrize("asked", ["10.0.0.1:80", "kv:10.0.0.1:7001", "kv:127.0.0.1:22"])
def test_no_client_chooses_another_address(servers: list[str], fetches: Fetches, asked: str) -> None:
    assert engines(servers).fetch([1] * 99, b"", asked) == 0
    assert not fetches.addresses


def test_a_server_is_asked_again_after_a_failed_transfer(servers: list[str], fetches: Fetches) -> None:
    chosen = engines(servers[:1])
    fetches.is_whole = False
    chosen.fetch([1] * 99, b"")
    Info.answers[int(servers[0].rpartition(":")[2])] = {"remote_port": 7009}  # restarted
    chosen.fetch([1] * 99, b"")
    assert [address.port for address in fetches.addresses] == [7001, 7009]


@pytest.mark.parametrize("answer", [[], {}, {"remote_port": "x"}, {"remote_port": 0}, {"remote_port": None}])
def test_a_server_that_says_something_else_is_left_out(servers: list[str], fetches: Fetches, answer: Any) -> None:
    Info.answers[int(servers[0].rpartition(":")[2])] = answer
    assert engines(servers[:1]).fetch([1] * 99, b"") == 0


def test_a_front_end_names_the_engine_of_each_request(fetches: Fetches, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that sent nothing is left out for a while; one that sent a part is not."""
    now = [0.0]
    monkeypatch.setattr(prefill_engines, "time", SimpleNamespace(monotonic=lambda: now[0]))
    nothing: Any = None
    routed = RoutedPrefillEngines(nothing, nothing, TransferSettings("decode", is_routed=True))
    assert routed.fetch([1] * 99, b"", "secret@10.0.0.1:7001") == 3
    fetches.is_whole = False
    assert routed.fetch([1] * 99, b"", "other@10.0.0.2:7002") == 3
    fetches.num_blocks = 0
    for _ in range(3):
        routed.fetch([1] * 99, b"", "other@10.0.0.2:7002")
    now[0] = 5.1
    routed.fetch([1] * 99, b"", "other@10.0.0.2:7002")
    assert [address.port for address in fetches.addresses] == [7001, 7002, 7002, 7002]
    assert fetches.secrets == ["secret", "other", "other", "other"]
    assert routed.fetch([1] * 99, b"") == 0
    assert len(fetches.addresses) == 4


def test_settings() -> None:
    for wrong, match in (
        ({"role": "decode"}, "needs the HTTP address"),
        ({"role": "prefill", "prefill_addresses": ("a:1",)}, "is for --role decode"),
        ({"role": "decode", "prefill_addresses": ("a",)}, "HOST:PORT"),
        ({"role": "all"}, "--role is one of"),
    ):
        with pytest.raises(ConfigError, match=match):
            TransferSettings(**wrong)  # type: ignore[arg-type]
