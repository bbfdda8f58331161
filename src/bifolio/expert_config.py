"""Sizes and choices of mixtures of experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bifolio.errors import ConfigError

EXPERT_LIMITS = {
    "num_experts": 1 << 13,
    "top_k": 1 << 8,
    "expert_size": 1 << 21,
    "num_groups": 1 << 13,
    "top_groups": 1 << 13,
    "group_best": 1 << 8,
}


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Mixtures of experts in place of the MLPs; `kernels.interface.Router` defines the choice."""

    num_experts: int
    top_k: int  # experts of a token
    expert_size: int  # width of one expert's MLP
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    renormalise: bool = False
    scale: float = 1.0
    selection_bias: bool = False  # a bias that changes the choice of experts, not their weights
    num_groups: int = 1
    top_groups: int = 1
    group_best: int = 1
    router_bias: bool = False
    expert_bias: bool = False
    shared_size: int = 0  # width of the MLP that every token passes through, beside its experts; 0: none
    shared_gate: bool = False  # the output of the shared MLP is multiplied by a sigmoid
    beside_mlp: bool = False  # experts are added to the MLP, each with norms of its own; experts have factors (Gemma 4)

    def __post_init__(self) -> None:
        for name in ("num_experts", "top_k", "expert_size", "num_groups", "top_groups", "group_best"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= EXPERT_LIMITS[name]:
                raise ConfigError(f"the model's {name} must be between 1 and {EXPERT_LIMITS[name]}, not {value!r}")
        if not 0 <= self.shared_size <= EXPERT_LIMITS["expert_size"]:
            raise ConfigError(f"the width of the shared experts must not be {self.shared_size}")
        if self.num_experts % self.num_groups or self.top_groups > self.num_groups:
            raise ConfigError(
                f"{self.top_groups} of {self.num_groups} groups cannot be chosen among {self.num_experts} experts"
            )
        size = self.num_experts // self.num_groups
        if self.top_k > size * self.top_groups or self.group_best > size:
            raise ConfigError(f"a token cannot choose {self.top_k} of {size * self.top_groups} experts")
