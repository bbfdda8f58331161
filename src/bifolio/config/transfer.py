"""Settings of prefill and decode on separate engines, read by the command line, the front end and the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from bifolio.errors import ConfigError

ROLES = ("both", "prefill", "decode")


class Address(NamedTuple):
    """A host and a port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """HOST:PORT, or [HOST]:PORT for an IPv6 address."""
        host, _, port = text.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise ConfigError(f"{text!r} is not the address of an engine: write HOST:PORT, such as 10.0.0.5:8200")
        return cls(host.strip("[]"), int(port))


class BlockSource(NamedTuple):
    """Where a prefill engine serves its blocks, and the secret that it asks for; written SECRET@HOST:PORT."""

    address: Address
    secret: str

    def __str__(self) -> str:
        host, port = self.address
        return f"{self.secret}@[{host}]:{port}" if ":" in host else f"{self.secret}@{host}:{port}"

    @classmethod
    def parse(cls, text: str) -> BlockSource:
        secret, _, address = text.partition("@")
        return cls(Address.parse(address), secret)


@dataclass(frozen=True, slots=True)
class TransferSettings:
    """The options of `bifolio serve` for prefill and decode on separate engines."""

    role: str = "both"
    host: str = "127.0.0.1"  # of a prefill engine: where blocks are served
    port: int = 0
    prefill_addresses: tuple[str, ...] = ()  # of a decode engine: HTTP addresses of prefill servers
    secret: str = ""
    threshold: int = 64  # tokens of the shortest prompt that is computed elsewhere
    is_routed: bool = False  # of a decode engine: the front end names a `BlockSource` with each request, no client does

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ConfigError(f"--role is one of {', '.join(ROLES)}, not {self.role!r}")
        if self.role == "decode" and not self.prefill_addresses and not self.is_routed:
            raise ConfigError(
                "--role decode needs the HTTP address of a prefill server: pass --prefill-address HOST:PORT"
            )
        if self.role != "decode" and self.prefill_addresses:
            raise ConfigError("--prefill-address is for --role decode: leave it out, or pass --role decode")
        for address in self.prefill_addresses:
            Address.parse(address)
