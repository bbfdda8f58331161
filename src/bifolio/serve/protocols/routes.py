"""The routes of other protocols than OpenAI's chat and completions, each a thin adapter over the same requests."""

from __future__ import annotations

from bifolio.serve.protocols import (
    adapters,
    anthropic,
    branches,
    embeddings,
    llama_cpp,
    ollama,
    openai_responses,
    rollouts,
    scores,
    sessions,
    snapshots,
)
from bifolio.serve.protocols.common import RouteRow

PROTOCOL_ROUTES: tuple[RouteRow, ...] = (
    *embeddings.ROUTES,
    *scores.ROUTES,
    *anthropic.ROUTES,
    *openai_responses.ROUTES,
    *branches.ROUTES,
    *snapshots.ROUTES,
    *sessions.ROUTES,
    *rollouts.ROUTES,
    *ollama.ROUTES,
    *llama_cpp.ROUTES,
    *adapters.ROUTES,
)
