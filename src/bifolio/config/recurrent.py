"""The description of the recurrent layers of a hybrid model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from bifolio.errors import ConfigError

RECURRENT_LIMITS = {
    "width": 1 << 8,
    "channels": 1 << 19,
    "heads": 1 << 12,
    "groups": 1 << 12,
    "key_size": 1 << 13,
    "value_size": 1 << 13,
    "norm_groups": 1 << 12,
}


@dataclass(frozen=True, slots=True)
class RecurrentConfig:
    """Recurrent layers in place of attention, or beside it; `kernels.interface.Recurrence` defines the computation."""

    kind: Literal["conv", "delta", "keyed", "mamba", "selective", "lightning", "lru", "rwkv"]
    width: int  # taps of the convolution; 1: there is none (lightning); rwkv: 2, this token and the one before
    channels: int
    heads: int = 0
    groups: int = 0
    key_size: int = 0
    value_size: int = 0
    conv_bias: bool = False
    projection_bias: bool = False  # of the input and output projections
    has_norm: bool = True  # gated norm of the output; convolutions have none
    norm_first: bool = True
    norm_groups: int = 1
    dt_limits: tuple[float, float] = (0.0, float("inf"))
    rate_scale: float = 1.0  # delta and keyed: factor of the rate at which a state learns
    decay_bound: float = 0.0  # keyed: most of -log of a decay; 0: none
    tiled: bool = False  # order of the heads: `kernels.interface.Recurrence`
    step_rank: int = 0  # selective: of the projection of dt; keyed: of those of a and z; 0: they are whole
    step_norms: Literal["none", "plain", "weighted"] = "none"  # selective: RMS norms of dt, b and c
    step_norm_eps: float = 1e-6
    norm_eps: float = 0.0  # of the gated norm; 0: that of the model
    gate_blocks: int = 1  # lru: blocks of the matrices of its two gates, which are diagonal but for them
    ranks: tuple[int, ...] = ()  # rwkv: of the low-rank products of decay, rate, gate and the mix of values

    def __post_init__(self) -> None:
        for name, limit in RECURRENT_LIMITS.items():
            value = getattr(self, name)
            least = 0 if self.kind == "conv" and name not in ("width", "channels", "norm_groups") else 1
            least = 2 if name == "width" and self.kind != "lightning" else least
            limit = RECURRENT_LIMITS["channels"] if self.by_channel and name == "value_size" else limit
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= limit:
                raise ConfigError(
                    f"the {name} of the recurrent layers must be between {least} and {limit}, not {value!r}"
                )
        if self.kind != "conv":
            if self.heads % self.groups:
                raise ConfigError(f"{self.heads} recurrent heads cannot share {self.groups} groups of keys evenly")
            if self.by_channel:
                self._check_channels()
            elif self.kind == "rwkv":
                self._check_rwkv()
            elif self.kind == "keyed" and (self.step_rank < 0 or self.heads != self.groups):
                raise ConfigError("keyed recurrent layers have a group for each head and a rank of their gates, or 0")
            elif self.channels != self.inner_size + 2 * self.groups * self.key_size:
                raise ConfigError(f"the convolution of the recurrent layers must not have {self.channels} channels")
            if self.inner_size % self.norm_groups:
                raise ConfigError(f"{self.inner_size} outputs cannot be normed in {self.norm_groups} groups")
        if not (math.isfinite(self.rate_scale) and self.rate_scale > 0):
            raise ConfigError(f"the rates of recurrent layers cannot be multiplied by {self.rate_scale}")
        if not (math.isfinite(self.decay_bound) and self.decay_bound >= 0) or (
            self.decay_bound and self.kind != "keyed"
        ):
            raise ConfigError(f"the decays of recurrent layers cannot have the bound {self.decay_bound}")
        if math.isnan(self.dt_limits[0]) or not self.dt_limits[0] <= self.dt_limits[1]:
            raise ConfigError(f"the limits of dt must be in order, not {self.dt_limits}")

    def _check_channels(self) -> None:
        """Check the sizes of layers whose channels have states of their own."""
        if (self.heads, self.value_size) != (1, self.channels):
            raise ConfigError(f"recurrent layers of the kind {self.kind} have one head of all channels")
        if self.kind == "selective" and self.step_rank < 1:
            raise ConfigError("selective recurrent layers have a rank of steps")
        if self.kind == "lru" and (self.key_size != 1 or self.gate_blocks < 1 or self.channels % self.gate_blocks):
            raise ConfigError(f"{self.channels} channels cannot have gates of {self.gate_blocks} equal blocks")

    def _check_rwkv(self) -> None:
        """Check the sizes of layers of RWKV, whose windows have an input of each of their two parts."""
        if self.heads != self.groups or self.key_size != self.value_size or self.width != 2:
            raise ConfigError("recurrent layers of RWKV have square states of their heads, and mix two tokens")
        if self.channels != 2 * self.inner_size:
            raise ConfigError(f"the windows of {self.inner_size} values of RWKV must not have {self.channels} channels")
        if len(self.ranks) != 4 or not all(0 < rank <= RECURRENT_LIMITS["channels"] for rank in self.ranks):
            raise ConfigError(f"recurrent layers of RWKV have four products of low rank, not those of {self.ranks}")

    @property
    def by_channel(self) -> bool:
        """Whether each channel has a state of its own."""
        return self.kind in ("selective", "lru")

    @property
    def norms_together(self) -> bool:
        """Whether a norm covers several heads."""
        return self.has_norm and self.kind in ("mamba", "lightning")

    @property
    def inner_size(self) -> int:
        """Values of all heads: inputs of the output projection."""
        return self.channels if self.kind == "conv" else self.heads * self.value_size

    @property
    def input_sizes(self) -> tuple[int, ...]:
        """Rows of each piece of the input projection, in the order of `Recurrence`.

        keyed: the products of low rank, from which a and z follow, are the last. rwkv: of the queries alone.
        """
        inner, keys, heads = self.inner_size, self.groups * self.key_size, self.heads
        if self.kind == "conv":
            return (inner, inner, inner)
        if self.kind == "rwkv":
            return (inner,)
        if self.by_channel:
            return (inner, inner)
        if self.kind == "lightning":
            return (inner, inner, keys, keys)
        if self.kind == "delta":
            return (keys, keys, inner, inner, heads, heads)
        if self.kind == "keyed" and not self.step_rank:
            return (keys, keys, inner, inner, heads, keys)
        if self.kind == "keyed":
            return (keys, keys, inner, heads, self.step_rank, self.step_rank)
        return (inner, inner, keys, keys, heads)

    @property
    def norm_size(self) -> int:
        """Weights of the gated norm; 0: none."""
        if not self.has_norm or self.kind == "conv" or self.by_channel:
            return 0
        return self.value_size if self.kind in ("delta", "keyed") else self.inner_size

    @property
    def vectors(self) -> int:
        """Learned values of each head beside the matrices: decay, bias, and the skip of Mamba."""
        return {"delta": 2, "keyed": 1 + self.key_size, "mamba": 3}.get(self.kind, 0)

    @property
    def bias_size(self) -> int:
        """Biases of the steps of a layer with heads."""
        return self.heads * (self.key_size if self.kind == "keyed" else 1)

    @property
    def lacks_in_first_layer(self) -> int:
        """Parameters that the first layer does not have: RWKV mixes its values with no others."""
        return (2 * self.ranks[3] + 1) * self.inner_size if self.kind == "rwkv" else 0

    def count_parameters(self, hidden_size: int) -> int:
        """Parameters of one recurrent layer, without the norm in front of it."""
        rows = sum(self.input_sizes)
        matrices = hidden_size * (rows + self.inner_size) + (rows + hidden_size) * self.projection_bias
        if self.kind == "selective":
            parameters = self.step_rank + 2 * self.key_size
            matrices += self.channels * (parameters + self.step_rank + self.key_size + 2)  # steps, decay, bias and skip
            matrices += parameters * (self.step_norms == "weighted")
        if self.kind == "keyed":
            matrices += self.step_rank * (self.groups * self.key_size + self.inner_size)
        if self.kind == "rwkv":
            matrices += 2 * hidden_size * self.inner_size + 2 * sum(self.ranks) * self.inner_size
            return matrices + 15 * self.inner_size  # mixes, factors of keys, biases and the norm
        if self.kind == "lru":
            matrices += self.channels * (2 * self.channels // self.gate_blocks + 3)  # gates, their biases and the decay
        taps = self.width + self.conv_bias if self.width > 1 else 0
        return matrices + self.channels * taps + self.heads * self.vectors + self.norm_size
