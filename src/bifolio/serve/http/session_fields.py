"""`session_id`, `ttl` and `pin` of a request: hints about its conversation."""

from __future__ import annotations

from bifolio.serve.http.errors import bad_request
from bifolio.serve.protocols.openai_types import Generation
from bifolio.sessions import SESSION_SECONDS, SessionHint


def session_of(request: Generation, num_prompts: int) -> SessionHint | None:
    """The hints of a request about its conversation."""
    if request.session_id is None:
        if request.ttl is not None or request.pin:
            name = "pin" if request.pin else "ttl"
            raise bad_request(f"{name} is about a conversation: pass its session_id, or leave {name} out", name)
        return None
    if num_prompts > 1:
        raise bad_request("a session is one conversation: send one prompt, or leave session_id out", "session_id")
    return SessionHint(request.session_id, request.ttl or SESSION_SECONDS, request.pin)
