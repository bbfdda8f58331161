"""The tensors of attention over cached latents."""

from __future__ import annotations

from dataclasses import dataclass

from bifolio.config import ModelConfig
from bifolio.kernels.interface import HeadLinear, Linear
from bifolio.model.fetch import Fetch, FetchVector, stacked_matrices
from bifolio.model.norm_tensors import stored_norm
from bifolio.model.weights import LatentWeights


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


HF_LATENT = LatentNames(
    query_down="self_attn.q_a_proj",
    query_norm="self_attn.q_a_layernorm",
    query_up="self_attn.q_b_proj",
    query="self_attn.q_proj",
    latent="self_attn.kv_a_proj_with_mqa",
    latent_norm="self_attn.kv_a_layernorm",
    key_up="self_attn.k_b_proj",
    value_up="self_attn.v_b_proj",
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
)


def assemble_latent(
    config: ModelConfig, own: LatentNames | None, prefix: str, fetch: Fetch, vector: FetchVector
) -> LatentWeights | None:
    """The projections of a layer; None: its attention is not over latents."""
    mla = config.mla
    if mla is None or own is None:
        return None
    d, heads, query_size = config.hidden_size, config.num_heads, config.num_heads * (mla.nope_size + mla.rope_size)

    def linear(name: str, rows: int, columns: int) -> Linear:
        return Linear((fetch(f"{prefix}{name}.weight", (rows, columns)),), (None,))

    def by_head(name: str, rows: int, columns: int) -> HeadLinear:
        matrices = stacked_matrices(prefix + name, heads, (rows, columns), fetch)
        return HeadLinear(tuple(Linear((matrix,), (None,)) for matrix in matrices))

    down = linear(own.query_down, mla.query_rank, d) if mla.query_rank else None
    return LatentWeights(
        rope_size=mla.rope_size,
        query_down=down,
        query_norm=None if down is None else stored_norm(config, prefix + own.query_norm, mla.query_rank, vector),
        query=linear(own.query, query_size, d) if down is None else linear(own.query_up, query_size, mla.query_rank),
        latent=linear(own.latent, mla.latent_size + mla.rope_size, d),
        latent_norm=stored_norm(config, prefix + own.latent_norm, mla.latent_size, vector),
        key_up=by_head(own.key_up, mla.latent_size, mla.nope_size),
        value_up=by_head(own.value_up, mla.value_size, mla.latent_size),
    )
