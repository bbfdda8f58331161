"""The products of a network that adapters change, and their numbers: the sites.

site  layer * len(ROLES) + place of the role in ROLES
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from bifolio.kernels.interface import Experts, Linear
from bifolio.model.weights import LayerWeights, ModelWeights

EXPERTS = "experts"
ROLES = (
    "qkv", "output", "up", "down", "gate", "recurrent_input", "recurrent_output",
    "router", "shared_gate", "query_down", "query", "latent", EXPERTS,
)  # fmt: skip

ChangeLinear = Callable[[str, Linear], Linear]
ChangeExperts = Callable[[Experts], Experts]


def site_of(layer: int, role: str) -> int:
    return layer * len(ROLES) + ROLES.index(role)


def place_of(site: int) -> tuple[int, str]:
    """The layer and the role of a site."""
    return site // len(ROLES), ROLES[site % len(ROLES)]


def changed_products(layer: LayerWeights, change: ChangeLinear, change_experts: ChangeExperts) -> LayerWeights:
    """The layer with every product that adapters can change replaced."""

    def own(role: str, linear: Linear | None) -> Linear | None:
        return linear if linear is None or not linear.parts else change(role, linear)

    changes: dict[str, object] = {
        role: own(role, getattr(layer, role)) for role in ("qkv", "output", "up", "down", "gate")
    }
    if layer.recurrent is not None:
        ends = own("recurrent_input", layer.recurrent.input), own("recurrent_output", layer.recurrent.output)
        changes["recurrent"] = replace(layer.recurrent, input=ends[0], output=ends[1])
    if layer.moe is not None:
        outer = {role: own(role, getattr(layer.moe, role)) for role in ("router", "shared_gate")}
        changes["moe"] = replace(layer.moe, **outer, experts=change_experts(layer.moe.experts))
    if layer.latent is not None:
        parts = {role: own(role, getattr(layer.latent, role)) for role in ("query_down", "query", "latent")}
        changes["latent"] = replace(layer.latent, **parts)
    return replace(layer, **changes)


def with_sites(weights: ModelWeights) -> ModelWeights:
    """The weights with the number of each product that adapters can change."""
    layers = tuple(
        changed_products(
            layer,
            lambda role, linear, number=number: replace(linear, site=site_of(number, role)),  # type: ignore[misc]
            lambda experts, number=number: replace(experts, site=site_of(number, EXPERTS)),  # type: ignore[misc]
        )
        for number, layer in enumerate(weights.layers)
    )
    return replace(weights, layers=layers)
