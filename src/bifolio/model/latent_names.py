"""The names of the tensors of attention over cached latents."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class IndexNames:
    """Names of the projections of an indexer."""

    query: str
    key: str
    key_norm: str
    weights: str


@dataclass(frozen=True, slots=True)
class LatentNames:
    """Names of the projections around cached latents; those by head are one tensor [heads, out, in]."""

    query_down: str
    query_norm: str
    query_up: str
    query: str
    latent: str
    latent_norm: str
    key_up: str
    value_up: str
    index: IndexNames


HF_LATENT = LatentNames(
    query_down="self_attn.q_a_proj",
    query_norm="self_attn.q_a_layernorm",
    query_up="self_attn.q_b_proj",
    query="self_attn.q_proj",
    latent="self_attn.kv_a_proj_with_mqa",
    latent_norm="self_attn.kv_a_layernorm",
    key_up="self_attn.k_b_proj",
    value_up="self_attn.v_b_proj",
    index=IndexNames(
        query="self_attn.indexer.wq_b",
        key="self_attn.indexer.wk",
        key_norm="self_attn.indexer.k_norm",
        weights="self_attn.indexer.weights_proj",
    ),
)
GGUF_LATENT = LatentNames(
    query_down="attn_q_a",
    query_norm="attn_q_a_norm",
    query_up="attn_q_b",
    query="attn_q",
    latent="attn_kv_a_mqa",
    latent_norm="attn_kv_a_norm",
    key_up="attn_k_b",
    value_up="attn_v_b",
    index=IndexNames("indexer.attn_q_b", "indexer.attn_k", "indexer.k_norm", "indexer.proj"),
)
