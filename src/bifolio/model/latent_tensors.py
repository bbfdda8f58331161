"""The tensors of attention over cached latents."""

from __future__ import annotations

from dataclasses import replace

from bifolio.config import ModelConfig
from bifolio.kernels.interface import HeadLinear, Linear, Norm
from bifolio.model.fetch import Fetch, FetchVector, stacked_matrices
from bifolio.model.latent_names import LatentNames
from bifolio.model.latent_weights import LatentWeights
from bifolio.model.norm_tensors import stored_norm


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

    def norm(name: str, size: int) -> Norm:
        stored = stored_norm(config, prefix + name, size, vector)
        return replace(stored, eps=mla.norm_eps) if mla.norm_eps else stored

    down = linear(own.query_down, mla.query_rank, d) if mla.query_rank else None
    return LatentWeights(
        rope_size=mla.rope_size,
        query_down=down,
        query_norm=None if down is None else norm(own.query_norm, mla.query_rank),
        query=linear(own.query, query_size, d) if down is None else linear(own.query_up, query_size, mla.query_rank),
        latent=linear(own.latent, mla.latent_size + mla.rope_size, d),
        latent_norm=norm(own.latent_norm, mla.latent_size),
        key_up=by_head(own.key_up, mla.latent_size, mla.nope_size),
        value_up=by_head(own.value_up, mla.value_size, mla.latent_size),
    )
