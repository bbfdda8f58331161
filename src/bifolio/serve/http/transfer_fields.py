"""Fields of requests and answers for prefill and decode on separate engines, under vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bifolio.api.messages import Hello

HEADER = b"x-prefiller-host-port"


def asked_address(headers: list[tuple[bytes, bytes]], params: Mapping[str, Any] | None) -> str:
    """The prefill engine that a gateway chose: an HTTP address, `kv:` and the address of blocks, or none."""
    given = next((value for name, value in headers if name == HEADER), b"")
    if given:
        return given.decode("ascii", "replace").strip()
    if params and params.get("do_remote_prefill") and params.get("remote_host"):
        return f"kv:{params['remote_host']}:{params.get('remote_port')}"
    return ""


def transfer_params(hello: Hello | None, host: str, params: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """`kv_transfer_params` of an answer: where a decode engine finds the blocks of the prompt; None: not asked for."""
    if not params or not params.get("do_remote_decode") or hello is None or not hello.transfer_port:
        return None
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": f"{hello.model_name}-{hello.pid}",
        "remote_host": host,
        "remote_port": hello.transfer_port,
    }
