"""The tensors of attention over cached latents."""

from __future__ import annotations

import math
from dataclasses import replace

from bifolio.config import LatentConfig, ModelConfig
from bifolio.kernels.interface import AttentionShape, HeadLinear, Linear, Norm
from bifolio.model.fetch import Fetch, FetchVector, stacked_matrices
from bifolio.model.latent_names import IndexNames, LatentNames
from bifolio.model.latent_weights import IndexWeights, LatentWeights
from bifolio.model.norm_tensors import stored_norm

INDEX_EPS = 1e-6  # of the norm of an indexer's keys, in all networks


def assemble_latent(
    config: ModelConfig, own: LatentNames | None, layer: int, prefix: str, fetch: Fetch, vector: FetchVector
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
        index=_indexer(config, mla, own.index, layer, prefix, fetch, vector),
    )


def _indexer(
    config: ModelConfig,
    mla: LatentConfig,
    own: IndexNames,
    layer: int,
    prefix: str,
    fetch: Fetch,
    vector: FetchVector,
) -> IndexWeights | None:
    """The indexer of a layer, if it has one."""
    if layer not in config.indexed_layers:
        return None
    heads, size, d = mla.index_heads, mla.index_size, config.hidden_size

    def linear(name: str, rows: int, columns: int) -> Linear:
        return Linear((fetch(f"{prefix}{name}.weight", (rows, columns)),), (None,))

    norm, bias = (vector(f"{prefix}{own.key_norm}.{part}", (size,)) for part in ("weight", "bias"))
    return IndexWeights(
        shape=AttentionShape(
            layer=len(config.cached_layers) + config.indexed_layers.index(layer),
            num_heads=heads,
            num_kv_heads=1,
            head_dim=size,
            scale=1 / math.sqrt(heads * size),
            rope_interleaved=mla.index_interleaved,
            top_k=mla.index_top_k,
        ),
        query=linear(own.query, heads * size, mla.query_rank),
        key=linear(own.key, size, d),
        key_norm=Norm(norm, bias, INDEX_EPS, centered=True),
        weights=linear(own.weights, heads, d),
    )
