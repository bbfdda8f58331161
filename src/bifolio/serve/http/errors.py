"""Errors with the right status, in the shape of the protocol that the request came by.

OpenAI      {"error": {"message", "type", "param", "code"}}
Anthropic   {"type": "error", "error": {"type", "message"}}      /v1/messages
ollama      {"error": "message"}                                 /api
llama.cpp   {"error": {"code", "message", "type"}}               /completion, /infill, /props, /slots
"""

from __future__ import annotations

import msgspec

from bifolio.errors import EngineFaultError, FaultKind
from bifolio.serve.http.encoding import encode_json

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    499: "client_closed_request",
    500: "server_error",
    503: "server_error",
    504: "timeout_error",
}


ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
LLAMA_CPP_PATHS = ("/completion", "/infill", "/props", "/slots", "/slots/{id}")


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(msgspec.Struct):
    error: ErrorDetail


class ApiError(Exception):
    """An answer other than the one that was hoped for."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        *,
        param: str | None = None,
        retry_after: int | None = None,  # seconds
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after = retry_after

    def body(self, path: str = "") -> bytes:
        """The body, in the shape of the protocol that the path belongs to."""
        kind = TYPES.get(self.status, "server_error")
        if path.startswith("/v1/messages"):
            kind = ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
            return encode_json({"type": "error", "error": {"type": kind, "message": self.message}})
        if path.startswith("/api/"):
            return encode_json({"error": self.message})
        if path in LLAMA_CPP_PATHS:
            return encode_json({"error": {"code": self.status, "message": self.message, "type": kind}})
        return encode_json(ErrorResponse(ErrorDetail(self.message, kind, self.param, self.code)))

    def headers(self) -> dict[str, str]:
        headers = {"content-type": "application/json"}
        if self.retry_after is not None:
            headers["retry-after"] = str(self.retry_after)
        if self.status in (408, 413):  # the rest of the request is not wanted
            headers["connection"] = "close"
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return headers


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, code, param=param)


def queue_full(num_open: int, wait: int) -> ApiError:
    """The answer to a request for which the queue has no place; it may come again after `wait` seconds."""
    message = f"the server is full: {num_open} requests run or wait: send this one again in {wait} s"
    return ApiError(429, message, "queue_full", retry_after=wait)


_FAULTS: dict[FaultKind, tuple[int, str | None, int | None]] = {  # (HTTP status, code, seconds to wait)
    FaultKind.INVALID_REQUEST: (400, None, None),
    FaultKind.EMPTY_PROMPT: (400, "empty_prompt", None),
    FaultKind.PROMPT_TOO_LONG: (400, "context_length_exceeded", None),
    FaultKind.TOKEN_ID: (400, "invalid_token_id", None),
    FaultKind.GRAMMAR: (400, "invalid_grammar", None),
    FaultKind.UNKNOWN_BRANCH: (404, "branch_not_found", None),
    FaultKind.UNKNOWN_SNAPSHOT: (404, "snapshot_not_found", None),
    FaultKind.SLOW_READER: (408, "slow_client", None),
    FaultKind.QUEUE_FULL: (429, "queue_full", 2),
    FaultKind.KEY_LIMIT: (429, "key_limit", 1),
    FaultKind.UNAVAILABLE: (503, "engine_unavailable", 2),
    FaultKind.LOST: (503, "engine_unavailable", 2),
    FaultKind.STEP_FAILED: (500, "generation_failed", None),
    FaultKind.NO_FINITE_LOGIT: (500, "generation_failed", None),
    FaultKind.ENGINE_ERROR: (500, None, None),
}


def api_error(fault: EngineFaultError) -> ApiError:
    """The answer to a request that the engine refused or lost."""
    status, code, retry_after = _FAULTS[fault.kind]
    return ApiError(status, str(fault), code, retry_after=retry_after)
