"""The OpenAPI document, made from the very types that requests are decoded into and answers are written from."""

from __future__ import annotations

from typing import Any

import msgspec

from bifolio import __version__
from bifolio.serve.http.errors import ErrorResponse
from bifolio.serve.protocols import branch_types as b
from bifolio.serve.protocols import openai_answers as r
from bifolio.serve.protocols import openai_types as p
from bifolio.serve.protocols import rollout_types as t
from bifolio.serve.protocols import sessions as se
from bifolio.serve.protocols import snapshot_types as sn
from bifolio.serve.protocols.adapters import LoadAdapterRequest, ScaledAdapters, UnloadAdapterRequest
from bifolio.serve.protocols.anthropic_types import CountTokensRequest, MessagesRequest
from bifolio.serve.protocols.ignored import describe
from bifolio.serve.protocols.llama_cpp_types import InfillRequest, LlamaCppRequest
from bifolio.serve.protocols.ollama_types import (
    EmbedRequest,
    GenerateRequest,
    OldEmbedRequest,
    OllamaChatRequest,
    PullRequest,
    ShowRequest,
)
from bifolio.serve.protocols.pooling_types import (
    ClassifyRequest,
    EmbedInputs,
    PoolingRequest,
    PredictInputs,
    RerankRequest,
    ScoreRequest,
)
from bifolio.serve.protocols.responses_types import ResponsesRequest

# path, method, summary, request type, response type
OPERATIONS: tuple[tuple[str, str, str, Any, Any], ...] = (
    ("/v1/completions", "post", "Complete a prompt", p.CompletionRequest, r.Completion),
    ("/v1/chat/completions", "post", "Answer a conversation", p.ChatRequest, r.ChatCompletion),
    ("/v1/embeddings", "post", "Embed texts", p.EmbeddingRequest, r.EmbeddingList),
    ("/v1/models", "get", "The model that is served", None, r.ModelList),
    ("/v1/models/{name}", "get", "The model, if it has this name", None, r.ModelCard),
    ("/tokenize", "post", "Text to tokens", p.TokenizeRequest, r.Tokens),
    ("/detokenize", "post", "Tokens to text", p.DetokenizeRequest, r.Detokenized),
    ("/health", "get", "Whether the front end is alive", None, r.Health),
    ("/ready", "get", "Whether requests would be served now", None, r.Health),
    ("/kv_transfer", "get", "Where the blocks of a prefill engine are served", None, r.BlockAddress),
)
BRANCH_OPERATIONS: tuple[tuple[str, str, str, Any, Any], ...] = (
    ("/v1/branches", "post", "Hold a text in the engine as a branch", b.BranchOpen, b.BranchCard),
    ("/v1/branches/{id}", "get", "A branch with its tokens", None, b.BranchCard),
    ("/v1/branches/{id}", "delete", "Close a branch", None, b.ClosedBranch),
    ("/v1/branches/{id}/fork", "post", "Fork a branch", b.BranchFork, b.BranchList),
    ("/v1/branches/{id}/append", "post", "Append to a branch", b.BranchAppend, b.BranchCard),
    ("/v1/branches/{id}/truncate", "post", "Cut a branch", b.BranchTruncate, b.BranchCard),
    ("/v1/branches/{id}/generate", "post", "Generate behind a branch", b.BranchGenerate, r.Completion),
    ("/v1/branches/{id}/score", "post", "Score continuations of a branch", b.BranchScore, b.ScoreList),
    ("/v1/snapshots", "post", "Save a text with its part of the cache", sn.SnapshotSave, sn.SnapshotCard),
    ("/v1/snapshots", "get", "The snapshots of this key", None, sn.SnapshotList),
    ("/v1/snapshots/{id}", "get", "A snapshot", None, sn.SnapshotCard),
    ("/v1/snapshots/{id}", "delete", "Remove a snapshot", None, sn.RemovedSnapshot),
    ("/v1/snapshots/{id}/restore", "post", "Continue a snapshot as a branch", sn.SnapshotRestore, b.BranchCard),
    ("/v1/sessions", "get", "The conversations of this client, and where their blocks are", None, se.SessionList),
    ("/v1/sessions/{id}", "delete", "Release a conversation", None, se.ReleasedSession),
    ("/slots/{id}", "post", "Save, restore or erase a slot, as llama.cpp does", sn.SlotFile, sn.SlotResult),
)
ROLLOUT_OPERATIONS: tuple[tuple[str, str, str, Any, Any], ...] = (
    (
        "/inference/v1/generate",
        "post",
        "Rollouts by token ids, for trainers",
        t.RolloutRequest,
        t.Rollout,
    ),
    ("/pause", "post", "Let requests wait, or end them", None, t.WeightStatus),
    ("/resume", "post", "Go on after a pause", None, t.WeightStatus),
    ("/sleep", "post", "Give memory back: the cache, or the weights, too", None, t.WeightStatus),
    ("/wake_up", "post", "Take the memory again", None, t.WeightStatus),
    ("/is_sleeping", "get", "Whether the engine sleeps", None, t.SleepStatus),
    ("/update_weights", "post", "Continue with the weights of a folder", t.WeightUpdate, t.WeightStatus),
    ("/reset_prefix_cache", "post", "Forget cached prefixes", None, t.WeightStatus),
    ("/reset_prefix_cache/", "post", "Forget cached prefixes (TRL)", None, t.WeightStatus),
    ("/get_world_size", "get", "Processes that share the model", None, t.WorldSize),
    ("/get_world_size/", "get", "Processes that share the model (TRL)", None, t.WorldSize),
    ("/health/", "get", "Whether the front end is alive (TRL)", None, r.Health),
    ("/generate/", "post", "Rollouts of several prompts (TRL)", t.TrlRequest, t.TrlRollouts),
    ("/init_communicator/", "post", "Join the group of a trainer (TRL)", t.Communicator, t.WeightStatus),
    ("/update_named_param/", "post", "Announce a tensor of the group (TRL)", t.NamedTensor, t.WeightStatus),
    ("/close_communicator/", "post", "Take the tensors and leave the group (TRL)", None, t.WeightStatus),
)
OPERATIONS += BRANCH_OPERATIONS + ROLLOUT_OPERATIONS
# Other protocols: path, method, summary, request type. Their answers are described by their own documents.
PROTOCOL_OPERATIONS: tuple[tuple[str, str, str, Any], ...] = (
    ("/v1/messages", "post", "Answer a conversation (Anthropic)", MessagesRequest),
    ("/v1/messages/count_tokens", "post", "Count the tokens of a conversation (Anthropic)", CountTokensRequest),
    ("/v1/responses", "post", "Answer and store a turn of a conversation (OpenAI)", ResponsesRequest),
    ("/v1/responses/{id}", "get", "A stored response (OpenAI)", None),
    ("/v1/responses/{id}", "delete", "Drop a stored response (OpenAI)", None),
    ("/v1/responses/{id}/input_items", "get", "The input of a stored response (OpenAI)", None),
    ("/api/generate", "post", "Answer a prompt (ollama)", GenerateRequest),
    ("/api/chat", "post", "Answer a conversation (ollama)", OllamaChatRequest),
    ("/api/embed", "post", "Embed texts (ollama)", EmbedRequest),
    ("/api/embeddings", "post", "Embed a text (ollama, the older form)", OldEmbedRequest),
    ("/v1/rerank", "post", "Sort documents by their relevance to a query (Jina, Cohere)", RerankRequest),
    ("/v2/rerank", "post", "The same as /v1/rerank", RerankRequest),
    ("/rerank", "post", "The same, also in the form of text-embeddings-inference", RerankRequest),
    ("/v1/score", "post", "Score pairs of texts (vLLM)", ScoreRequest),
    ("/score", "post", "The same as /v1/score", ScoreRequest),
    ("/classify", "post", "Classify texts (vLLM)", ClassifyRequest),
    ("/pooling", "post", "Vectors of tokens, or of texts (vLLM)", PoolingRequest),
    ("/embed", "post", "Embed texts (text-embeddings-inference)", EmbedInputs),
    ("/predict", "post", "Classify texts or pairs (text-embeddings-inference)", PredictInputs),
    ("/api/tags", "get", "The model that is served (ollama)", None),
    ("/api/ps", "get", "The model that is loaded (ollama)", None),
    ("/api/show", "post", "Describe the model (ollama)", ShowRequest),
    ("/api/pull", "post", "Fetch a model (ollama)", PullRequest),
    ("/api/version", "get", "The version of the server (ollama)", None),
    ("/completion", "post", "Complete a prompt (llama.cpp)", LlamaCppRequest),
    ("/infill", "post", "Fill a gap in a text (llama.cpp)", InfillRequest),
    ("/props", "get", "Properties of the server (llama.cpp)", None),
    ("/slots", "get", "Slots (llama.cpp)", None),
    ("/lora-adapters", "get", "Adapters by number (llama.cpp)", None),
    ("/lora-adapters", "post", "Scale adapters for all requests; needs an admin key (llama.cpp)", ScaledAdapters),
    ("/v1/load_lora_adapter", "post", "Load an adapter; needs an admin key (vLLM)", LoadAdapterRequest),
    ("/v1/unload_lora_adapter", "post", "Forget an adapter; needs an admin key (vLLM)", UnloadAdapterRequest),
)
EVENTS = {"/v1/completions": r.Completion, "/v1/chat/completions": r.ChatChunk}
ERRORS = {
    "400": "The request is not valid",
    "401": "No valid key",
    "404": "Not found",
    "408": "The request did not arrive in time",
    "413": "The request is too large",
    "429": "Too many requests: see Retry-After",
    "500": "The computation failed",
    "503": "The engine is not available: see Retry-After",
    "504": "The request took longer than its time limit",
}


def openapi_document() -> dict[str, Any]:
    types = [ErrorResponse, r.ChatChunk, *(kind for row in OPERATIONS for kind in row[3:] if kind is not None)]
    types += [request for *_, request in PROTOCOL_OPERATIONS if request is not None]
    _, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    describe(components)
    paths: dict[str, Any] = {}
    for path, method, summary, request, response in OPERATIONS:
        paths.setdefault(path, {})[method] = _operation(path, summary, request, response)
    for path, method, summary, request in PROTOCOL_OPERATIONS:
        paths.setdefault(path, {})[method] = _protocol_operation(path, summary, request)
    plain = {"schema": {"type": "string"}}
    metrics = {"description": "Metrics", "content": {"text/plain": plain}}
    paths["/metrics"] = {"get": {"summary": "Prometheus metrics", "responses": _responses(metrics)}}
    page = {"description": "A page for people", "content": {"text/html": plain}}
    paths["/docs"] = {"get": {"summary": "This document as a page", "responses": _responses(page)}}
    live = {"description": "Events", "content": {"text/event-stream": plain}}
    interval = {
        "name": "interval",
        "in": "query",
        "schema": {"type": "number", "minimum": 0.05, "maximum": 60, "default": 0.25},
    }
    paths["/live"] = {
        "get": {"summary": "Slots and blocks, live", "parameters": [interval], "responses": _responses(live)}
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "bifolio", "version": __version__, "description": "OpenAI-compatible inference"},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _operation(path: str, summary: str, request: Any, response: Any) -> dict[str, Any]:
    content = {"application/json": {"schema": _ref(response)}}
    if path in EVENTS:
        text = f"Server-sent events, each a {EVENTS[path].__name__}, and `[DONE]` at the end"
        content["text/event-stream"] = {"schema": {"type": "string", "description": text}}
    operation: dict[str, Any] = {
        "summary": summary,
        "responses": _responses({"description": "The answer", "content": content}),
    }
    if request is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": _ref(request)}}}
    for name in ("name", "id"):
        if f"{{{name}}}" in path:
            operation["parameters"] = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}}]
    return operation


def _protocol_operation(path: str, summary: str, request: Any) -> dict[str, Any]:
    answer: dict[str, Any] = {"application/json": {"schema": {}}}
    responses: dict[str, Any] = {"200": {"description": "The answer", "content": answer}}
    responses |= {code: {"description": text, "content": answer} for code, text in ERRORS.items()}
    operation: dict[str, Any] = {"summary": summary, "responses": responses}
    if request is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": _ref(request)}}}
    if "{id}" in path:
        operation["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
    return operation


def _responses(success: dict[str, Any]) -> dict[str, Any]:
    failure = {"application/json": {"schema": _ref(ErrorResponse)}}
    return {"200": success, **{code: {"description": text, "content": failure} for code, text in ERRORS.items()}}


def _ref(kind: Any) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}
