"""The exact number of parameters of a network, from its shapes alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bifolio.config.compressed import CompressedConfig
    from bifolio.config.layers import MoeConfig
    from bifolio.config.model import LatentConfig, ModelConfig


def count_parameters(config: ModelConfig, num_experts: int | None) -> int:
    """Parameters with `num_experts` experts in every layer that has some."""
    d, own = config.hidden_size, config.recurrent
    per_norm = d * (config.norm_weight + (config.norm == "layer" and config.norm_bias))
    with_mlp = [index for index, layer in enumerate(config.layers) if layer.mlp]
    norms = sum(layer.attention or layer.recurrent for layer in config.layers) + len(with_mlp)
    norms = norms * (config.pre_norms + config.post_norms) - config.num_layers * (not config.has_mlp_norm) + 1
    if config.residual_norms:
        norms = 2 * config.num_layers
    norms += config.embedding_norm and not (config.bidirectional and config.pre_norms)  # else it is the first layer's
    tables = 1 if config.tie_embeddings or not config.language_head else 2
    total = config.vocab_size * (d * tables + config.head_bias) + config.token_types * d
    total += (config.max_position + config.position_offset) * d * config.learned_positions + per_norm * norms
    total += config.num_heads * config.distance_buckets
    total += sum(_attention(config, layer) for layer in config.attention_layers)
    if own is not None:
        total += len(config.recurrent_layers) * own.count_parameters(d) - own.lacks_in_first_layer
    for layer in with_mlp:
        if config.moe is not None and num_experts is not None and config.has_experts(layer):
            total += _experts(config, config.moe, num_experts)
            total += _mlp(config, layer) if config.moe.beside_mlp else 0
        else:
            total += _mlp(config, layer)
    return total + _layer_inputs(config) + _streams(config) + _shared_blocks(config) + _hyper(config)


def _attention(config: ModelConfig, layer: int) -> int:
    if config.mla is not None:
        gates = config.hidden_size * config.gate_size(layer)
        return gates + _latent(config, config.mla) + _indexer(config, config.mla) * (layer in config.indexed_layers)
    if config.compressed is not None:
        return _compressed(config, config.compressed, layer)
    d, dim = config.hidden_size, config.head_size(layer)
    query, kv = config.num_heads * dim, config.kv_heads(layer) * dim
    writes = config.kv_source(layer) == layer
    values = config.kv_heads(layer) * config.value_dim(layer) * (not config.layers[layer].keys_as_values)
    projected, mixed = query + (kv + values) * writes, config.num_heads * config.value_dim(layer)
    qk_width = query + kv if config.qk_norm_all_heads else dim * (2 if writes else 1)
    total = d * projected + mixed * d + projected * config.qkv_bias + d * config.output_bias
    total += (d + config.gate_bias) * config.gate_size(layer) + mixed * config.sub_norms
    total += config.num_heads * config.has_sinks(layer)
    return total + qk_width * (config.qk_norm and not config.qk_norm_rotated)


def _latent(config: ModelConfig, mla: LatentConfig) -> int:
    d, heads, query = config.hidden_size, config.num_heads, config.num_heads * (mla.nope_size + mla.rope_size)
    total = mla.query_rank * (d + 1 + query) if mla.query_rank else d * query
    total += d * (mla.latent_size + mla.rope_size) + mla.latent_size
    return total + mla.latent_size * heads * (mla.nope_size + mla.value_size) + heads * mla.value_size * d


def _indexer(config: ModelConfig, mla: LatentConfig) -> int:
    d, size = config.hidden_size, mla.index_size
    return mla.query_rank * mla.index_heads * size + d * (size + mla.index_heads) + 2 * size


def _compressed(config: ModelConfig, own: CompressedConfig, layer: int) -> int:
    d, dim, query = config.hidden_size, config.head_dim, config.query_size
    total = own.query_rank * (d + 1 + query) + (d + 1) * dim + config.num_heads
    total += own.output_rank * (query + own.output_groups * d)
    tokens, chooses = config.layers[layer].entry_tokens, config.layers[layer].chooses_entries
    if tokens:
        total += _compressor(d, dim, tokens, 1 + chooses)
    if chooses:
        total += _compressor(d, own.index_size, tokens, 2)
        total += own.query_rank * own.index_heads * own.index_size + d * own.index_heads
    return total


def _compressor(d: int, size: int, tokens: int, runs: int) -> int:
    return (2 * d + tokens) * runs * size + size


def _hyper(config: ModelConfig) -> int:
    own = config.hyper
    if own is None:
        return 0
    inputs = own.count * config.hidden_size
    return 2 * config.num_layers * (own.width * (inputs + 1) + 3) + own.count * (inputs + 1) + 1


def _mlp(config: ModelConfig, layer: int) -> int:
    d, ffn, num_up = config.hidden_size, config.mlp_size(layer), 2 if config.gated_mlp else 1
    coefficients = (2 if config.activation == "xielu" else 0) + ffn * config.sub_norms
    return d * ffn * (num_up + 1) + (ffn * num_up + d) * config.mlp_bias + coefficients


def _experts(config: ModelConfig, moe: MoeConfig, num_experts: int) -> int:
    d, width = config.hidden_size, moe.expert_size
    router = (moe.num_experts + moe.zero_experts) * (d + moe.router_bias)  # the bias of the choice is no parameter
    matrices = 3 if config.gated_mlp else 2
    expert = matrices * d * width + ((matrices - 1) * width + d) * moe.expert_bias
    norms = 4 * d + moe.num_experts if moe.beside_mlp else 0
    return router + num_experts * expert + matrices * d * moe.shared_size + d * moe.shared_gate + norms


def _shared_blocks(config: ModelConfig) -> int:
    """The parameters of each use of a block, without those of blocks that are counted for each use."""
    own, d, users = config.shared_blocks, config.hidden_size, config.attention_layers
    if own is None:
        return 0
    inputs, up = config.attention_inputs, config.intermediate_size * (2 if config.gated_mlp else 1)
    heads = config.query_size + 2 * config.kv_size
    use = d * d + own.rank * (d + up + (3 * inputs + heads) * own.adapts_attention)
    block = (inputs - d) * heads + inputs  # of queries, keys and values, and the norm in front of them
    again = _attention(config, users[0]) + _mlp(config, users[0]) + d  # with the norm of the MLP
    count = min(own.count, len(users))
    return len(users) * use + count * block - (len(users) - count) * again


def _layer_inputs(config: ModelConfig) -> int:
    own, d, layers = config.layer_inputs, config.hidden_size, config.num_layers
    if own is None:
        return 0
    return own.size * (own.vocab_size * layers + layers * d + 1) + layers * (2 * d * own.size + d)


def _streams(config: ModelConfig) -> int:
    own, d = config.streams, config.hidden_size
    if own is None:
        return 0
    layer = own.count**2 * (1 + own.count) + own.count * d + d + 2 * own.low_rank * d + d + d
    return 2 * (own.count - 1) * d * d + config.num_layers * layer
