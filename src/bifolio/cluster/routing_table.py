"""The routers of this process. Ray creates its request routers itself, and the front end tells them about output, so
both find the state of a deployment here by its name."""

from __future__ import annotations

import threading

from bifolio.cluster.prefix_router import PrefixRouter

_routers: dict[str, PrefixRouter] = {}
_lock = threading.Lock()


def router_of(deployment: str, kind: type[PrefixRouter] = PrefixRouter) -> PrefixRouter:
    """The router of a deployment ("app/name"), created when it is first asked for."""
    with _lock:
        if deployment not in _routers:
            _routers[deployment] = kind()
        return _routers[deployment]
