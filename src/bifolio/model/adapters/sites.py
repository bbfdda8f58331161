"""The products of a network that adapters change, and their numbers: the sites.

site  layer * len(ROLES) + place of the role in ROLES; that of the head is behind those of all layers
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from bifolio.kernels.interface import NO_SITE, Experts, Linear, ProductShape
from bifolio.model.compressed_weights import CompressedWeights
from bifolio.model.weights import LayerWeights, ModelWeights

EXPERTS = "experts"
ROLES = (
    "qkv", "output", "up", "down", "gate", "recurrent_input", "recurrent_output",
    "router", "shared_gate", "query_down", "query", "latent", EXPERTS, "entries", "index_query", "index_entries",
)  # fmt: skip

ChangeLinear = Callable[[str, Linear], Linear]
ChangeExperts = Callable[[Experts], Experts]


def site_of(layer: int, role: str) -> int:
    return layer * len(ROLES) + ROLES.index(role)


def head_site(num_layers: int) -> int:
    return num_layers * len(ROLES)


def place_of(site: int) -> tuple[int, str]:
    """The layer and the role of a site."""
    return site // len(ROLES), ROLES[site % len(ROLES)]


def changed_products(layer: LayerWeights, change: ChangeLinear, change_experts: ChangeExperts) -> LayerWeights:
    """The layer with every product that adapters can change replaced: not those of blocks that layers share."""

    def own(role: str, linear: Linear) -> Linear:
        return change(role, linear) if linear.parts else linear

    def unshared(role: str, linear: Linear) -> Linear:
        return own(role, linear) if layer.shared is None else linear

    def optional(role: str, linear: Linear | None) -> Linear | None:
        return None if linear is None else own(role, linear)

    recurrent, moe, latent = layer.recurrent, layer.moe, layer.latent
    if recurrent is not None:
        ends = own("recurrent_input", recurrent.input), own("recurrent_output", recurrent.output)
        recurrent = replace(recurrent, input=ends[0], output=ends[1])
    if moe is not None:
        gate = optional("shared_gate", moe.shared_gate)
        moe = replace(moe, router=own("router", moe.router), shared_gate=gate, experts=change_experts(moe.experts))
    if latent is not None:
        down = optional("query_down", latent.query_down)
        latent = replace(latent, query_down=down, query=own("query", latent.query), latent=own("latent", latent.latent))
    compressed = None if layer.compressed is None else _changed_compressed(layer.compressed, own)
    return replace(
        layer,
        qkv=unshared("qkv", layer.qkv),
        output=unshared("output", layer.output),
        up=unshared("up", layer.up),
        down=unshared("down", layer.down),
        gate=optional("gate", layer.gate),
        recurrent=recurrent,
        moe=moe,
        latent=latent,
        compressed=compressed,
    )


def _changed_compressed(own: CompressedWeights, change: ChangeLinear) -> CompressedWeights:
    """The projections of queries, keys, entries and indexers; not those of groups of heads."""
    rows, index = own.compressor, own.index
    if rows is not None:
        rows = replace(rows, rows=change("entries", rows.rows))
    if index is not None:
        entries = replace(index.compressor, rows=change("index_entries", index.compressor.rows))
        index = replace(index, query=change("index_query", index.query), compressor=entries)
    down, query, key = change("query_down", own.query_down), change("query", own.query), change("latent", own.key)
    return replace(own, query_down=down, query=query, key=key, compressor=rows, index=index)


def product_shapes(weights: ModelWeights) -> dict[int, ProductShape]:
    """The sizes of the products that adapters can change, by their sites; those of experts are not among them."""
    found: dict[int, ProductShape] = {}

    def note(role: str, linear: Linear) -> Linear:
        if linear.site != NO_SITE:
            widths = tuple(int(part.shape[0]) for part in linear.parts)
            found[linear.site] = ProductShape(widths, linear.in_features)
        return linear

    for layer in weights.layers:
        changed_products(layer, note, lambda experts: experts)
    return found


def with_sites(weights: ModelWeights) -> ModelWeights:
    """The weights with the number of each product that adapters can change; those that have them stay as they are."""
    if any(linear.site != NO_SITE for layer in weights.layers for linear in (layer.qkv, layer.output, layer.down)):
        return weights
    layers = tuple(
        changed_products(
            layer,
            lambda role, linear, number=number: replace(linear, site=site_of(number, role)),  # type: ignore[misc]
            lambda experts, number=number: replace(experts, site=site_of(number, EXPERTS)),  # type: ignore[misc]
        )
        for number, layer in enumerate(weights.layers)
    )
    head = replace(weights.head, site=head_site(len(layers))) if weights.head.parts else weights.head
    return replace(weights, layers=layers, head=head)
