"""The part of a layer behind attention: a plain MLP or a mixture of experts, and the products of all parts."""

from __future__ import annotations

from dataclasses import replace

from bifolio.kernels.interface import NO_SITE, Array, Batch, KernelSet, Linear, Shards
from bifolio.model.shared_weights import with_low_rank
from bifolio.model.weights import LayerWeights, MoeWeights
from bifolio.model.xielu import xielu_coefficients


def feed_forward(
    layer: LayerWeights, x: Array, activation: str, gated: bool, batch: Batch, kernels: KernelSet, residual: Array
) -> Array:
    """The part of a layer behind attention: a plain MLP, or a mixture of experts. x: the norm of the residual.

    Experts whose sum is added later (`MoeWeights.is_shortcut`) are not part of it.
    """
    if layer.moe is None or layer.moe.is_shortcut:
        out = mlp(layer, x, activation, gated, batch, kernels)
    else:
        out = mixture(layer, layer.moe, x, activation, gated, batch, kernels, residual)
    return out if layer.post_mlp_norm is None else kernels.norm(out, layer.post_mlp_norm)


def mlp(layer: LayerWeights, x: Array, activation: str, gated: bool, batch: Batch, kernels: KernelSet) -> Array:
    up = product(x, layer.up, batch, kernels)
    if layer.shared is not None:
        up = with_low_rank(up, x, layer.shared.up, kernels)
    if layer.xielu is not None:
        return joined(kernels.xielu(up, xielu_coefficients(layer.xielu)), layer.down, batch, kernels)
    mixed = kernels.act_mul(up, activation, layer.cutoff) if gated else kernels.act(up, activation)
    mixed = mixed if layer.mlp_sub_norm is None else kernels.norm(mixed, layer.mlp_sub_norm)
    return joined(mixed, layer.down, batch, kernels)


def mixture(
    layer: LayerWeights,
    moe: MoeWeights,
    x: Array,
    activation: str,
    gated: bool,
    batch: Batch,
    kernels: KernelSet,
    residual: Array,
) -> Array:
    """The experts that each token chooses, and the shared MLP if there is one."""
    mixed = chosen_experts(moe, x, batch, kernels, residual)
    if not layer.up.parts:
        return mixed
    shared = mlp(layer, x, activation, gated, batch, kernels)
    shared = shared if moe.mlp_output_norm is None else kernels.norm(shared, moe.mlp_output_norm)
    if moe.shared_gate is not None:
        shared = kernels.gate(shared, product(x, moe.shared_gate, batch, kernels))
    return kernels.add(mixed, shared, 0.5 if moe.shared_mean else 1.0)


def chosen_experts(moe: MoeWeights, x: Array, batch: Batch, kernels: KernelSet, residual: Array) -> Array:
    """The weighted sum of the experts of each token. x: the norm of the residual."""
    routed = x if moe.router_norm is None else kernels.norm(residual, moe.router_norm)
    logits = product(routed, moe.router, batch, kernels)
    if moe.table is None:
        routing = kernels.route(logits, moe.choice)
    else:
        routing = kernels.route_by_token(logits, moe.choice, moe.table, batch.token_ids)
    inputs = x if moe.input_norm is None else kernels.norm(residual, moe.input_norm)
    if moe.scales_inputs:
        inputs = kernels.weigh(inputs, routing)
        routing = kernels.route(logits, replace(moe.choice, renormalise=True))  # weights of 1
    identities = None
    if moe.has_identities:
        routing, identities = kernels.take_identities(inputs, routing, len(moe.experts.up))
    adapters = None if moe.experts.site == NO_SITE else batch.adapters
    mixed = exchanged(kernels.mix_experts(inputs, routing, moe.experts, adapters), moe.shards, kernels)
    mixed = mixed if identities is None else kernels.add(mixed, identities)
    return mixed if moe.output_norm is None else kernels.norm(mixed, moe.output_norm)


def product(x: Array, linear: Linear, batch: Batch, kernels: KernelSet) -> Array:
    """A product, changed by the adapters of the batch."""
    y = kernels.linear(x, linear)
    if batch.adapters is None or linear.site == NO_SITE:
        return y
    return kernels.adapt(y, x, linear.site, batch.adapters)


def joined(x: Array, linear: Linear, batch: Batch, kernels: KernelSet) -> Array:
    """A product whose input is spread over the ranks of tensor parallelism; its result is whole on every rank."""
    shards = linear.shards
    if shards is not None and shards.inputs:
        x = kernels.all_gather(x, shards.inputs)
    return exchanged(product(x, linear, batch, kernels), shards, kernels)


def exchanged(x: Array, shards: Shards | None, kernels: KernelSet) -> Array:
    """The results of all ranks, side by side or added."""
    if shards is None:
        return x
    return kernels.all_gather(x, shards.outputs) if shards.outputs else kernels.all_reduce(x)
