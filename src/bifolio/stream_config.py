"""Sizes of networks whose layers read more than one residual stream: inputs of each layer, and parallel streams."""

from __future__ import annotations

from dataclasses import dataclass

from bifolio.errors import ConfigError

MOST_STREAMS = 64
MOST_COLUMNS = 1 << 18


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
