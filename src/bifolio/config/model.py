"""`ModelConfig`: a network of any supported family as data. Families differ in these fields, not in code."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from bifolio.config.compressed import MOST_ENTRY_TOKENS, CompressedConfig, HyperConfig
from bifolio.config.layers import LayerConfig, LayerInputConfig, MoeConfig, SharedBlockConfig, StreamConfig
from bifolio.config.parameters import count_parameters
from bifolio.config.recurrent import RecurrentConfig
from bifolio.errors import ConfigError

MOST_TOKEN_TYPES = 7  # types times `LONG_ROPE` are added to positions, which are numbers of 31 bits

# The largest sizes of a network, several times those of real ones: memory is never planned for absurd sizes of a file.
MODEL_LIMITS = {
    "vocab_size": 1 << 22,
    "hidden_size": 1 << 18,
    "num_layers": 1 << 12,
    "num_heads": 1 << 12,
    "num_kv_heads": 1 << 12,
    "head_dim": 1 << 13,
    "intermediate_size": 1 << 21,
    "max_position": 1 << 27,
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding; a model has one, or one for its local and one for its global layers."""

    theta: float = 10000.0
    rotary_dim: int = 0  # leading dimensions of a head that are rotated
    scaling: Literal["none", "linear", "llama3", "yarn", "longrope", "proportional"] = "none"
    factor: float = 1.0
    original_max_position: int = 0  # context length before extension (llama3, yarn, longrope)
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float = 1.0  # multiplies cos and sin (yarn, longrope)
    truncate: bool = True  # yarn: the ramp begins and ends at whole dimensions
    frequency_factors: tuple[float, ...] = ()  # divisor of each frequency: longrope, proportional, or from a file
    frequency_factors_short: tuple[float, ...] = ()  # longrope, for sequences up to original_max_position

    @property
    def has_two_sets(self) -> bool:
        """Whether short and long sequences are rotated by different frequencies (`bifolio.long_rope`)."""
        return self.scaling == "longrope" and bool(self.frequency_factors_short)

    def __post_init__(self) -> None:
        if self.rotary_dim <= 0 or self.rotary_dim % 2:
            raise ConfigError(f"rope needs a positive even number of rotated dimensions, not {self.rotary_dim}")
        if not (math.isfinite(self.theta) and self.theta > 0):
            raise ConfigError(f"rope theta must be a positive number, not {self.theta}")
        for name in ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor"):
            if not math.isfinite(getattr(self, name)) or not getattr(self, name):
                raise ConfigError(f"rope {name} must be a number other than 0, not {getattr(self, name)}")
        for factors in (self.frequency_factors, self.frequency_factors_short):
            if factors and len(factors) != self.rotary_dim // 2:
                raise ConfigError(
                    f"rope has {len(factors)} frequency factors for {self.rotary_dim // 2} pairs of rotated dimensions"
                )


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Attention over cached latents (MLA): keys and values of all heads are projections of one row for each token.

    The cache holds |rope|latent| as one head of keys, which are the values, too. Queries have `nope` and `rope`
    dimensions; nope is multiplied with the key projection of its head, instead of the latents.

    With an indexer a query attends to the `index_top_k` positions that the indexer ranks highest; its heads have one
    key for each token, which is cached beside the latent. The first `rope_size` dimensions of its heads are rotated.
    """

    latent_size: int
    rope_size: int
    nope_size: int
    value_size: int  # of a head, after its value projection
    query_rank: int = 0  # rank of the query projection; 0: one matrix
    index_heads: int = 0  # of the indexer; 0: there is none, and queries attend to all positions
    index_size: int = 0  # of a head of the indexer
    index_top_k: int = 0
    index_interleaved: bool = False  # rope of the indexer on neighbouring pairs
    norm_eps: float = 0.0  # of the norms of latents and compressed queries; 0: that of the model

    def __post_init__(self) -> None:
        for name in ("latent_size", "rope_size", "nope_size", "value_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= MODEL_LIMITS["head_dim"]:
                raise ConfigError(f"the model's {name} must be between 1 and {MODEL_LIMITS['head_dim']}, not {value!r}")
        if not 0 <= self.query_rank <= MODEL_LIMITS["hidden_size"]:
            raise ConfigError(f"the rank of the query projection must not be {self.query_rank}")
        self._check_indexer()

    def _check_indexer(self) -> None:
        sizes = self.index_heads, self.index_size, self.index_top_k
        if not any(sizes):
            return
        if min(sizes) < 1 or max(self.index_heads, self.index_size) > MODEL_LIMITS["head_dim"]:
            raise ConfigError("an indexer has {} heads of {} for {} positions: they are no real sizes".format(*sizes))
        if self.index_size < self.rope_size or not self.query_rank:
            raise ConfigError(
                f"an indexer reads compressed queries, and its heads have at least {self.rope_size} dimensions"
            )


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The description of a network without its weights."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position: int  # context length in tokens

    norm: Literal["rms", "layer"] = "rms"
    norm_weight: bool = True  # False: norms are not scaled (OLMo 1)
    norm_bias: bool = True  # of layer norms; RMS norms have none
    norm_eps: float = 1e-5
    norm_offset: float = 0.0  # added to the norm's weight: Gemma stores weight − 1
    activation: Literal["silu", "gelu_tanh", "gelu", "relu", "relu2", "swiglu_clamped", "silu_clamped", "xielu"] = (
        "silu"
    )
    gated_mlp: bool = True
    qkv_bias: bool = False
    output_bias: bool = False  # bias of the attention's output projection
    mlp_bias: bool = False
    head_bias: bool = False  # bias of the logits
    qk_norm: bool = False  # RMS norm on each query and key head before rope
    qk_norm_all_heads: bool = False  # one norm over all heads of a token instead of each head (OLMo 2)
    qk_norm_after_rope: bool = False
    qk_norm_rotated: bool = False  # norms of heads have no weights, and layers without rope have none (Llama 4)
    pre_norms: bool = True  # norms on the inputs of attention and MLP
    post_norms: bool = False  # norms on the outputs of attention and MLP, before the residual addition (Gemma)
    parallel_block: bool = False  # attention and MLP read the same norm; both are added to the residual stream
    parallel_norms: bool = False  # the MLP of a parallel block reads a norm of its own (GPT-NeoX)
    tie_embeddings: bool = False
    embedding_norm: bool = False  # of the embeddings; in encoders with `pre_norms` in place of the first layer's own
    learned_positions: bool = False
    sub_norms: bool = False  # norms on the inputs of the last projections of attention and MLP (BitNet)
    alibi: float = 0.0  # scores fall with the distance; the slopes of heads go down to 2 ** -alibi; 0: off
    ropes: tuple[RopeConfig, ...] = ()  # empty with learned positions
    rope_interleaved: bool = False  # rotate pairs (2i, 2i+1) instead of (i, i + rotary_dim/2)
    layers: tuple[LayerConfig, ...] = ()  # one for each layer; empty: all are usual
    value_norm: bool = False  # RMS norm without weights on each value head
    layer_scales: bool = False  # the residual stream is multiplied by a stored number after each layer
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # factor of the outputs of attention and MLP that are added to the residual stream
    attention_scale: float = 0.0  # 0: 1/sqrt(head_dim)
    attention_softcap: float = 0.0  # of attention scores; 0: off
    attention_temperature: float = 0.0  # growth of queries with the log of their position; 0: off
    temperature_period: int = 1  # positions after which a query grows again
    temperature_unrotated: bool = False  # only in layers without rope, whose positions count from 1 (Llama 4)
    window_in_chunks: bool = False  # a window begins at the last multiple of its size
    logit_scale: float = 1.0  # factor of the logits
    logit_softcap: float = 0.0  # 0: off
    moe: MoeConfig | None = None
    mla: LatentConfig | None = None  # num_kv_heads is 1, and head_dim the size of a cached row
    recurrent: RecurrentConfig | None = None
    layer_inputs: LayerInputConfig | None = None  # a second embedding of each token, with a part for each layer
    streams: StreamConfig | None = None  # parallel residual streams
    shared_blocks: SharedBlockConfig | None = None  # attention and MLPs that layers share
    hyper: HyperConfig | None = None  # parallel residual streams that are mixed by the token
    compressed: CompressedConfig | None = None  # attention to compressed entries; num_kv_heads is 1
    weight_factors: tuple[tuple[str, tuple[float, ...]], ...] = ()  # of a folder's matrices, put into them at load
    attention_gate: bool = False  # the output of attention is multiplied by a sigmoid of the layer's input
    gate_by_head: bool = False  # one gate for each head, without a bias, instead of one for each value (LFM3)
    value_size: int = 0  # of a head, whose rows are padded to `head_dim`; 0: `head_dim` (MiMo)
    value_scale: float = 1.0  # factor of the values
    sinks_in_windows: bool = False  # only layers with a window have sinks
    sinks: bool = False  # attention with a learned score for each head that takes a share of the weights
    bidirectional: bool = False  # tokens see those after them, too: an encoder, which computes a text as a whole
    language_head: bool = True  # the network has logits of a next token; False: it makes vectors and scores alone
    residual_norms: bool = False  # norms of the residual stream behind attention and MLP, in place of `pre_norms`
    kept_norms: float = 0.0  # inputs of attention and MLP, times this, replace the residual stream (MiniMax); 0: off
    token_types: int = 0  # kinds of tokens with an embedding each, such as the first and the second of two texts
    position_offset: int = 0  # rows of the table of learned positions that no position reads
    distance_bias: Literal["none", "alibi", "buckets"] = "none"  # added to the scores of attention
    distance_buckets: int = 0  # learned biases of each head, of both signs of the distance together
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in MODEL_LIMITS:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
                raise ConfigError(f"the model's {name} must be a positive whole number, not {value!r}")
            if value > MODEL_LIMITS[name]:
                raise ConfigError(f"the model's {name} is {value}: at most {MODEL_LIMITS[name]} are supported")
        if len(set(self.layers)) <= 1:
            object.__setattr__(self, "layers", (self.layers or (LayerConfig(),))[:1] * self.num_layers)
        if len(self.layers) != self.num_layers:
            raise ConfigError(f"layers has {len(self.layers)} entries for {self.num_layers} layers")
        for rope in self.ropes:
            if rope.rotary_dim > max(self.head_dim, *(layer.head_dim or 0 for layer in self.layers)):
                raise ConfigError(f"rope rotates {rope.rotary_dim} dimensions of heads of {self.head_dim}")
            if max(len(rope.frequency_factors), len(rope.frequency_factors_short)) > rope.rotary_dim:
                raise ConfigError("rope has more frequency factors than rotated dimensions")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} key/value heads evenly: "
                "the first must be a multiple of the second"
            )
        if self.mla is not None and (self.num_kv_heads, self.head_dim) != (
            1,
            self.mla.rope_size + self.mla.latent_size,
        ):
            raise ConfigError("attention over latents needs one key/value head of the size of a cached row")
        has_positions = self.learned_positions or self.ropes or self.alibi or self.distance_bias != "none"
        if self.recurrent is None and not has_positions:
            raise ConfigError("a model without learned positions needs a rope configuration")
        self._check_layers()
        self._check_encoder()
        self._check_blocks()
        self._check_entries()
        if self.value_size and not 0 < self.value_size <= self.head_dim:
            raise ConfigError(f"values of {self.value_size} do not fit into heads of {self.head_dim}")
        if self.qk_norm_all_heads and self.qk_norm_after_rope:
            raise ConfigError("a norm over all query heads after rope is not supported")
        for name in ("residual_scale", "logit_scale", "embedding_scale", "value_scale"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ConfigError(f"the model's {name} must be a positive number, not {getattr(self, name)}")

    def _check_layers(self) -> None:
        """Check that the layers fit together, and to the model."""
        for index, layer in enumerate(self.layers):
            for name, limit in (
                ("head_dim", "head_dim"),
                ("kv_heads", "num_kv_heads"),
                ("mlp_size", "intermediate_size"),
            ):
                value = getattr(layer, name)
                if value is not None and not 0 < value <= MODEL_LIMITS[limit]:
                    raise ConfigError(f"the model's {limit} must be between 1 and {MODEL_LIMITS[limit]}, not {value}")
            if self.num_heads % self.kv_heads(index):
                raise ConfigError(
                    f"{self.num_heads} query heads cannot share {self.kv_heads(index)} key/value heads evenly"
                )
            if not (layer.attention or layer.recurrent or layer.mlp):
                raise ConfigError(f"layer {index} has neither attention, nor a recurrence, nor an MLP")
            if layer.norms_outputs and not self._has_movable_norms:
                raise ConfigError(f"layer {index} has norms on its outputs, and the model has others than on inputs")
            if layer.rope is not None and layer.rope >= max(len(self.ropes), 1):
                raise ConfigError(f"layer {index} names a rope configuration that does not exist")
            source = self.kv_source(index)
            same = 0 <= source <= index and all(
                size(index) == size(source) for size in (self.head_size, self.kv_heads, lambda n: self.layers[n].window)
            )
            if not same or self.layers[source].kv_source is not None:
                raise ConfigError(f"layer {index} cannot read the keys and values of layer {source}")
            if not layer.chooses and (index == 0 or not self.indexed_layers):
                raise ConfigError(f"layer {index} reads chosen positions, and no layer before it has an indexer")
        if self.moe is not None and self.moe.shortcut and self.has_experts(self.num_layers - 1):
            raise ConfigError("the experts of the last layer cannot be added behind the next one")
        if not self.attention_layers and not self.recurrent_layers:
            raise ConfigError("models without any attention or recurrent layer are not supported")
        if (self.recurrent is not None) != bool(self.recurrent_layers):
            raise ConfigError("a model with a recurrent configuration has no recurrent layer, or the reverse")

    @property
    def _has_movable_norms(self) -> bool:
        """Whether norms on the inputs of attention and MLP may be on the outputs in some layers."""
        others = self.post_norms or self.parallel_block or self.residual_norms or self.kept_norms
        return self.pre_norms and not others and self.streams is None and self.shared_blocks is None

    def _check_encoder(self) -> None:
        """Check the fields of encoders."""
        if not 0 <= self.token_types <= MOST_TOKEN_TYPES:
            raise ConfigError(
                f"the model has {self.token_types} types of tokens: at most {MOST_TOKEN_TYPES} are supported"
            )
        if self.position_offset < 0 or self.position_offset + self.max_position > MODEL_LIMITS["max_position"]:
            raise ConfigError(f"positions cannot begin at row {self.position_offset} of their table")
        if (self.distance_bias == "buckets") != (self.distance_buckets > 0) or self.distance_buckets % 4:
            raise ConfigError(f"{self.distance_buckets} buckets of distances are not a positive multiple of 4")
        if self.distance_buckets > MODEL_LIMITS["num_heads"]:
            raise ConfigError(f"{self.distance_buckets} buckets of distances are more than any real model has")
        differ = any(layer.head_dim or layer.kv_heads or layer.kv_source is not None for layer in self.layers)
        if self.bidirectional and (self.recurrent is not None or self.mla is not None or differ):
            raise ConfigError("an encoder has attention with equal heads in all layers, and no recurrent layers")

    def _check_blocks(self) -> None:
        """Check that layers with shared blocks have equal attention in front of a recurrence."""
        if self.shared_blocks is None:
            return
        users = {layer for layer in self.layers if layer.attention or layer.mlp}
        if len(users) != 1 or not all(layer.attention and layer.mlp and layer.recurrent for layer in users):
            raise ConfigError("layers that share blocks of attention and an MLP are recurrent, and otherwise equal")
        if self.moe is not None or self.mla is not None or self.attention_gate or self.residual_scale != 1.0:
            raise ConfigError("shared blocks have plain attention and a plain MLP")

    def _check_entries(self) -> None:
        """Check that attention to compressed entries and mixed streams fit the rest of the network."""
        own, rotated = self.compressed, max((rope.rotary_dim for rope in self.ropes), default=0)
        if (own is None) != (self.hyper is None):
            raise ConfigError("networks with compressed entries have mixed streams, and the reverse")
        if own is None:
            if any(layer.entry_tokens or layer.hashed for layer in self.layers):
                raise ConfigError("layers with entries need a configuration of these")
            return
        if self.num_kv_heads != 1 or self.num_heads % own.output_groups or not self.sinks or not rotated:
            raise ConfigError(
                f"{self.num_heads} heads over {self.num_kv_heads} heads of keys do not make {own.output_groups} groups"
            )
        for index, layer in enumerate(self.layers):
            if not 0 <= layer.entry_tokens <= MOST_ENTRY_TOKENS or layer.entry_tokens == 1:
                raise ConfigError(f"an entry of layer {index} cannot stand for {layer.entry_tokens} tokens")
            if layer.window is None or not layer.mlp or layer.rope is None or not self.has_experts(index):
                raise ConfigError(f"layer {index} with entries needs a window, rope and experts")
            if layer.chooses_entries and not layer.entry_tokens:
                raise ConfigError(f"layer {index} has no entries to choose")
        if any(layer.chooses_entries for layer in self.layers):
            own.check_indexer(rotated)

    @property
    def scale(self) -> float:
        """The factor of the dot product of a query and a key."""
        return self.attention_scale or 1.0 / math.sqrt(self.head_dim)

    @property
    def attention_inputs(self) -> int:
        """Inputs of the projections of queries, keys and values."""
        return self.hidden_size * (1 if self.shared_blocks is None else 2)

    def block_source(self, layer: int) -> int:
        """The layer whose attention and MLP this layer uses: itself, or the first one with the same shared block."""
        if self.shared_blocks is None or not self.layers[layer].attention:
            return layer
        users = self.attention_layers
        return users[users.index(layer) % self.shared_blocks.count]

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def head_size(self, layer: int) -> int:
        return self.layers[layer].head_dim or self.head_dim

    def gate_size(self, layer: int) -> int:
        """Gates on the output of attention."""
        return self.num_heads * (1 if self.gate_by_head else self.head_size(layer)) * self.attention_gate

    @property
    def gate_bias(self) -> bool:
        return self.qkv_bias and not self.gate_by_head

    def kv_heads(self, layer: int) -> int:
        return self.layers[layer].kv_heads or self.num_kv_heads

    def value_dim(self, layer: int) -> int:
        """Values of a head, as files store them."""
        return self.value_size or self.head_size(layer)

    def has_sinks(self, layer: int) -> bool:
        return self.sinks and (not self.sinks_in_windows or self.layers[layer].window is not None)

    def mlp_size(self, layer: int) -> int:
        return self.layers[layer].mlp_size or self.intermediate_size

    def kv_source(self, layer: int) -> int:
        """The layer whose keys and values this layer reads: itself, or an earlier one."""
        source = self.layers[layer].kv_source
        return layer if source is None else source

    def has_experts(self, layer: int) -> bool:
        own = self.layers[layer]
        return self.moe is not None and own.mlp and not own.dense

    @property
    def has_mlp_norm(self) -> bool:
        """Whether MLPs read norms of their own."""
        return self.parallel_norms or not self.parallel_block

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers with attention."""
        return tuple(index for index, layer in enumerate(self.layers) if layer.attention)

    @property
    def indexed_layers(self) -> tuple[int, ...]:
        """The layers with an indexer, whose keys are cached behind the rows of all layers."""
        if self.mla is None or not self.mla.index_heads:
            return ()
        return tuple(layer for layer in self.attention_layers if self.layers[layer].chooses)

    @property
    def entry_rows(self) -> tuple[tuple[int, int], ...]:
        """(layer, columns) of the rows behind the keys of all layers: those of entries, and of their indexers.

        Each is a pair: projections of every token, and the entries in the rows of their last tokens.
        """
        found: list[tuple[int, int]] = []
        for index, layer in enumerate(self.layers):
            sizes = [self.head_dim] * bool(layer.entry_tokens)
            if self.compressed is not None and layer.chooses_entries:
                sizes.append(self.compressed.index_size)
            for size in sizes:
                found += (index, size * (4 if layer.chooses_entries else 2)), (index, size)
        return tuple(found)

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        """The layers with a recurrence."""
        return tuple(index for index, layer in enumerate(self.layers) if layer.recurrent)

    @property
    def cached_layers(self) -> tuple[int, ...]:
        """The layers with keys and values of their own, which are cached.

        No later pass reads those of an encoder: all of its layers use the entries of one.
        """
        if self.bidirectional:
            return self.attention_layers[:1]
        return tuple(layer for layer in self.attention_layers if self.kv_source(layer) == layer)

    @property
    def num_parameters(self) -> int:
        """The exact number of parameters, from the shapes alone: memory can be planned before weights are read."""
        return count_parameters(self, None if self.moe is None else self.moe.num_experts)

    @property
    def num_active_parameters(self) -> int:
        """Parameters that one token is multiplied with: those of all experts but its own are left out."""
        return count_parameters(self, None if self.moe is None else self.moe.top_k)
