"""The OpenAPI document is true: answers follow it, and requests made from it never break the server."""

from __future__ import annotations

from functools import cache
from typing import Any

import jsonschema
import pytest
from serving import RunningServer, sse_events

CASES: list[tuple[str, str, Any]] = [
    ("/v1/completions", "post", {"prompt": "Once", "max_tokens": 3}),
    ("/v1/completions", "post", {"prompt": ["Once", "The"], "n": 2, "logprobs": 2, "echo": True, "max_tokens": 3}),
    ("/v1/completions", "post", {"prompt": [5, 6], "beam_search": {"width": 2}, "return_token_ids": True, "n": 2}),
    ("/v1/completions", "post", {"prompt": "Once", "max_tokens": 0, "echo": True, "logprobs": 0}),
    ("/v1/chat/completions", "post", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}),
    (
        "/v1/chat/completions",
        "post",
        {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "logprobs": True, "top_logprobs": 2, "n": 2},
    ),
    (
        "/v1/chat/completions",
        "post",
        {
            "messages": [{"role": "user", "content": "Hi"}],
            "tools": [{"type": "function", "function": {"name": "now"}}],
            "tool_choice": "required",
        },
    ),
    ("/v1/embeddings", "post", {"input": ["a", "b"]}),
    ("/v1/embeddings", "post", {"input": "a", "encoding_format": "base64"}),
    ("/v1/models", "get", None),
    ("/v1/models/tiny", "get", None),
    ("/tokenize", "post", {"prompt": "Hello"}),
    ("/detokenize", "post", {"tokens": [5, 6]}),
    ("/health", "get", None),
    ("/ready", "get", None),
    ("/v1/completions", "post", {"prompt": 5}),
    ("/v1/models/other", "get", None),
]


@cache
def document(server: RunningServer) -> dict[str, Any]:
    found: dict[str, Any] = server.http().get("/openapi.json").json()
    return found


def validate(server: RunningServer, value: Any, schema: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator({**schema, "components": document(server)["components"]}).validate(value)


@pytest.mark.full
@pytest.mark.parametrize(("path", "method", "body"), CASES)
def test_answers_follow_the_document(server: RunningServer, path: str, method: str, body: Any) -> None:
    with server.http() as http:
        answer = http.request(method, path, json=body)
    template = "/v1/models/{name}" if path.startswith("/v1/models/") else path
    described = document(server)["paths"][template][method]["responses"]
    assert str(answer.status_code) in described
    schema = described[str(answer.status_code)]["content"]["application/json"]["schema"]
    validate(server, answer.json(), schema)


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/v1/completions", {"prompt": "Once", "logprobs": 1, "echo": True}, "Completion"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True}, "ChatChunk"),
    ],
)
def test_events_follow_the_document(server: RunningServer, path: str, body: dict[str, Any], name: str) -> None:
    options = {"stream": True, "max_tokens": 4, "stream_options": {"include_usage": True}}
    with server.http() as http:
        events = sse_events(http.post(path, json={**body, **options}).text)
    assert events[-1] == "[DONE]"
    for event in events[:-1]:
        validate(server, event, {"$ref": f"#/components/schemas/{name}"})


def test_every_route_is_in_the_document(server: RunningServer) -> None:
    from bifolio.serve.http.app import ROUTES
    from bifolio.serve.protocols.routes import PROTOCOL_ROUTES

    paths = {path.replace("{name:path}", "{name}") for path, _, _ in (*ROUTES, *PROTOCOL_ROUTES)}
    assert paths - {"/openapi.json"} == set(document(server)["paths"])


OTHERS = ("/v1/messages", "/v1/responses", "/api/generate", "/api/chat", "/api/show", "/api/pull", "/completion")


@pytest.mark.full
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize",
                                  "/detokenize", "/v1/models", "/v1/models/{name}", "/metrics", *OTHERS])  # fmt: skip
def test_schemathesis_finds_no_server_error(server: RunningServer, path: str) -> None:
    """A bounded run of requests made from the document, good ones and bad ones."""
    import hypothesis
    import schemathesis

    schema = schemathesis.openapi.from_dict(document(server))
    operation = next(item.ok() for item in schema.get_all_operations() if item.ok().path == path)
    for mode in schemathesis.GenerationMode:

        @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
        @hypothesis.settings(
            max_examples=5 if path in OTHERS else 15, deadline=None, derandomize=True, database=None,
            suppress_health_check=list(hypothesis.HealthCheck),
        )  # fmt: skip
        def run(case: Any) -> None:
            if isinstance(case.body, dict):
                case.body.pop("stream", None)
                if path.startswith("/api/"):
                    case.body |= {"stream": False, "options": {"num_predict": 2}} if path != "/api/show" else {}
                elif path == "/v1/responses":
                    case.body |= {"max_output_tokens": 2, "store": False}
                elif path in ("/completion", "/infill"):
                    case.body["n_predict"] = 2
                elif "max_tokens" in case.body or "prompt" in case.body or "messages" in case.body:
                    case.body["max_tokens"] = 2
            answer = case.call(base_url=server.url, timeout=60)
            assert answer.status_code < 500, (case.body, answer.status_code, answer.text)
            described = document(server)["paths"][path][case.method.lower()]["responses"]
            if str(answer.status_code) in described and answer.headers["content-type"] == "application/json":
                content = described[str(answer.status_code)]["content"]["application/json"]
                validate(server, answer.json(), content["schema"])

        try:
            run()
        except hypothesis.errors.Unsatisfiable:  # nothing can be wrong with a request without parameters
            assert mode is schemathesis.GenerationMode.NEGATIVE
    assert server.wait_idle()["num_used_blocks"] == 0
