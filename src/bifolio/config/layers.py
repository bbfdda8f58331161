"""The parts of a network's layers: `LayerConfig`, where layers may differ, and the parts that few networks have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from bifolio.errors import ConfigError

EXPERT_LIMITS = {
    "num_experts": 1 << 13,
    "top_k": 1 << 8,
    "expert_size": 1 << 21,
    "num_groups": 1 << 13,
    "top_groups": 1 << 13,
    "group_best": 1 << 8,
}
MOST_STREAMS = 64
MOST_BLOCKS = 1 << 8
MOST_COLUMNS = 1 << 18


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """The parts of a layer and their sizes; None: that of the model.

    A layer may have both attention and a recurrence (Falcon-H1), or neither (Nemotron-H).
    """

    attention: bool = True
    recurrent: bool = False
    mlp: bool = True  # a plain MLP, or experts if the model has any
    dense: bool = False  # a plain MLP in a model with experts
    window: int | None = None  # sliding window in tokens, itself included; None: the whole context
    rope: int | None = 0  # index into `ModelConfig.ropes`; None: no positions
    head_dim: int | None = None
    kv_heads: int | None = None
    mlp_size: int | None = None
    cutoff: float | None = None  # gates that many deviations above the mean are kept; None: all
    kv_source: int | None = None  # an earlier layer whose keys and values are read; None: its own
    keys_as_values: bool = False  # values are the keys, before norm and rope
    norms_outputs: bool = False  # norms on the outputs of attention and MLP in place of their inputs (OLMo Hybrid)
    chooses: bool = True  # in a network with indexers: False reads the positions that an earlier layer chose
    entry_tokens: int = 0  # that one compressed entry stands for, in a network with entries; 0: the layer has none
    chooses_entries: bool = False  # an indexer chooses the entries, which overlap
    hashed: bool = False  # a table gives the experts of a token by its id


def layers_of(count: int, **values: Sequence[Any]) -> tuple[LayerConfig, ...]:
    """Layers whose fields have these values, one for every layer, or none: the usual. Equal layers are one object."""
    given = {name: own for name, own in values.items() if own}
    for name, own in given.items():
        if len(own) != count:
            raise ConfigError(f"{name} has {len(own)} entries for {count} layers")
    known: dict[LayerConfig, LayerConfig] = {}
    layers = (LayerConfig(**{name: own[layer] for name, own in given.items()}) for layer in range(count))
    return tuple(known.setdefault(layer, layer) for layer in layers)


USUAL = {each.name: each.default for each in fields(LayerConfig)}  # values of a layer of most networks


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Mixtures of experts in place of the MLPs; `kernels.interface.Router` defines the choice."""

    num_experts: int
    top_k: int  # experts of a token
    expert_size: int  # width of one expert's MLP
    scoring: Literal["softmax", "sigmoid", "sqrt_softplus"] = "softmax"
    renormalise: bool = False
    scale: float = 1.0
    selection_bias: bool = False  # a bias that changes the choice of experts, not their weights
    num_groups: int = 1
    top_groups: int = 1
    group_best: int = 1
    router_bias: bool = False
    expert_bias: bool = False
    shared_size: int = 0  # width of the MLP that every token passes through, beside its experts; 0: none
    shared_mean: bool = False  # the outputs of the experts and of the shared MLP are averaged (Cohere 2)
    shared_gate: bool = False  # the output of the shared MLP is multiplied by a sigmoid
    scales_inputs: bool = False  # the weight of a token's one expert multiplies its input, not its output (Llama 4)
    band: float = 0.0  # sparse mixing (`kernels.interface.Router`); 0: off
    zero_experts: int = 0  # more experts, whose output is their input; they are behind the others
    shortcut: bool = False  # the sum of the experts is added behind the next layer, the shared MLP at once (LongCat)
    beside_mlp: bool = False  # experts are added to the MLP, each with norms of its own; experts have factors (Gemma 4)

    def __post_init__(self) -> None:
        for name in ("num_experts", "top_k", "expert_size", "num_groups", "top_groups", "group_best"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= EXPERT_LIMITS[name]:
                raise ConfigError(f"the model's {name} must be between 1 and {EXPERT_LIMITS[name]}, not {value!r}")
        if not 0 <= self.shared_size <= EXPERT_LIMITS["expert_size"]:
            raise ConfigError(f"the width of the shared experts must not be {self.shared_size}")
        if not 0 <= self.zero_experts <= EXPERT_LIMITS["num_experts"]:
            raise ConfigError(f"a network with {self.zero_experts} experts that return their input is not supported")
        if self.scales_inputs and self.top_k != 1:
            raise ConfigError(f"weights multiply the inputs of one expert of a token, not of {self.top_k}")
        if self.num_experts % self.num_groups or self.top_groups > self.num_groups:
            raise ConfigError(
                f"{self.top_groups} of {self.num_groups} groups cannot be chosen among {self.num_experts} experts"
            )
        size = self.num_experts // self.num_groups
        if self.top_k > size * self.top_groups or self.group_best > size:
            raise ConfigError(f"a token cannot choose {self.top_k} of {size * self.top_groups} experts")


@dataclass(frozen=True, slots=True)
class LayerInputConfig:
    """A second embedding of each token, with a part for each layer, that is added to the layer's output through a gate.

    inputs = (norm(projection(x)) + table[token] * sqrt(size)) / sqrt(2)     x: the embeddings of the tokens
    x <- x + norm(projection(act(gate(x)) * inputs of the layer))            behind the MLP of each layer
    """

    size: int  # of the part of one layer
    vocab_size: int  # rows of the table; tokens past them read row 0

    def __post_init__(self) -> None:
        if not 0 < self.size <= MOST_COLUMNS:
            raise ConfigError(f"the inputs of a layer must have between 1 and {MOST_COLUMNS} values, not {self.size}")
        if not 0 < self.vocab_size <= 1 << 22:
            raise ConfigError(f"a table of {self.vocab_size} inputs of layers is not supported")


@dataclass(frozen=True, slots=True)
class StreamConfig:
    """Parallel residual streams, one of which passes through the layers (AltUp), with low-rank residuals (LAuReL).

    A layer predicts all streams from those before it, computes the active one, and corrects the others by the
    difference between the active one and its prediction. The coefficients depend on the token.
    """

    count: int
    active: int = 0
    low_rank: int = 64  # of the residual that is added to the output of attention
    scales_output: bool = True  # the active stream is multiplied by a vector before it gates the inputs of a layer

    def __post_init__(self) -> None:
        if not 1 < self.count <= MOST_STREAMS:
            raise ConfigError(f"a network with parallel streams has between 2 and {MOST_STREAMS}, not {self.count}")
        if not 0 <= self.active < self.count:
            raise ConfigError(f"the active stream is {self.active} and must be one of {self.count}")
        if not 0 < self.low_rank <= MOST_COLUMNS:
            raise ConfigError(f"the rank of the added residual must be between 1 and {MOST_COLUMNS}")


@dataclass(frozen=True, slots=True)
class SharedBlockConfig:
    """Blocks of attention and an MLP whose weights the layers with attention share, in turn (Zamba2).

    y = output(mlp(norm(attention(norm(|x|e|)))))     e: the embeddings of the tokens, of the size of x
    x <- x + recurrence(norm(x + y))

    Each use of a block has its own output matrix, and products of low rank that are added to those of the MLP.
    """

    count: int
    rank: int  # of the added products
    adapts_attention: bool = False  # products are added to queries, keys and values, too

    def __post_init__(self) -> None:
        if not 0 < self.count <= MOST_BLOCKS:
            raise ConfigError(f"a network shares between 1 and {MOST_BLOCKS} blocks, not {self.count}")
        if not 0 < self.rank <= MOST_COLUMNS:
            raise ConfigError(f"the rank of added products must be between 1 and {MOST_COLUMNS}, not {self.rank}")
