"""A draft head: one layer that predicts tokens from the hidden states of another model, its *target*.

Two kinds of heads are published. Both read, for each position i, the token t at i + 1 and a hidden state h of
position i, and predict the token at i + 2:

    EAGLE-3   h = merge(states after three layers)        qkv = W [norm(embed(t)), norm(h)]      residual stream: h
    MTP       h = the target's normed last state          x = W [norm(embed(t)), norm(h)]        residual stream: x

A head continues its own draft with its own hidden state in place of h; some families norm it. The products of W are
split into the parts of both inputs, so that the two are multiplied apart and added.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from bifolio.config import ModelConfig
from bifolio.kernels.interface import Array, Batch, KernelSet, Linear, Norm, Rotation, Storage
from bifolio.model.feed_forward import feed_forward, joined
from bifolio.model.transformer import PagedAttentionLayer
from bifolio.model.weights import LayerWeights, ModelWeights, prepare_layer
from bifolio.quant.formats import QuantFormat
from bifolio.quant.tensor import QuantizedTensor


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """The weights of a draft head."""

    config: ModelConfig  # of its one layer
    kind: Literal["eagle", "mtp"]
    taps: tuple[int, ...]  # numbers of layers of the target after which its hidden states are read
    state_size: int  # width of one of these states
    state_scale: float  # factor of the target's residual stream
    merge: Linear | None  # [d, taps * state_size]  of EAGLE
    state_norm: Norm | None  # of MTP: the last norm of the target
    embedding: QuantizedTensor | Array | None  # [vocab, d]; None: the target's
    token_norm: Norm
    hidden_norm: Norm
    token_part: Linear  # the columns of W for the token, of qkv (EAGLE) or of the layer's input (MTP)
    hidden_part: Linear  # the columns of W for the hidden state
    layer: LayerWeights  # of EAGLE: without qkv and attention norm
    final_norm: Norm
    head: Linear | None  # [draft vocab, d]; None: the target's
    inverse_frequencies: tuple[Array, ...]
    rope_scales: tuple[float, ...]
    token_ids: np.ndarray | None = None  # i64[draft vocab]  the target's ids of the head's tokens; None: the same ids
    norms_residual: bool = False  # of EAGLE: the residual stream begins with the normed hidden state
    chains_normed: bool = False  # of MTP: the head's own hidden states are normed by `final_norm` when they are read
    prepared_for: KernelSet | None = None

    @property
    def states_width(self) -> int:
        return len(self.taps) * self.state_size

    def matrices(self) -> list[QuantizedTensor | Array]:
        """The matrices of the head alone, without those of the target."""
        layer = self.layer
        linears = [
            self.merge,
            self.token_part,
            self.hidden_part,
            layer.qkv,
            layer.output,
            layer.up,
            layer.down,
            layer.gate,
            self.head,
        ]
        found = [part for linear in linears if linear is not None for part in linear.parts]
        if layer.latent is not None:
            found += layer.latent.matrices()
        if layer.moe is not None:
            found += [*layer.moe.router.parts, *layer.moe.experts.matrices()]
        return found if self.embedding is None else [self.embedding, *found]


@dataclass(frozen=True, slots=True)
class LoadedHead:
    """A draft head from a folder, or from the files of its target."""

    path: Path
    weights: HeadWeights

    @property
    def config(self) -> ModelConfig:
        return self.weights.config


def prepare_head(head: HeadWeights, kernels: KernelSet, target: ModelWeights) -> HeadWeights:
    """Prepare the weights at load; those of the target are shared, not copied."""
    if head.prepared_for is kernels:
        return head
    return replace(
        head,
        merge=None if head.merge is None else kernels.prepare_linear(head.merge),
        state_norm=None if head.state_norm is None else kernels.prepare_norm(head.state_norm),
        embedding=target.embedding if head.embedding is None else kernels.prepare_embedding(head.embedding),
        token_norm=kernels.prepare_norm(head.token_norm),
        hidden_norm=kernels.prepare_norm(head.hidden_norm),
        token_part=kernels.prepare_linear(head.token_part),
        hidden_part=kernels.prepare_linear(head.hidden_part),
        layer=prepare_layer(head.layer, kernels),
        final_norm=kernels.prepare_norm(head.final_norm),
        head=target.head if head.head is None else kernels.prepare_linear(head.head),
        inverse_frequencies=tuple(kernels.from_host(frequencies) for frequencies in head.inverse_frequencies),
        prepared_for=kernels,
    )


def forward(head: HeadWeights, batch: Batch, kernels: KernelSet, storage: Storage | None, *, own_states: bool) -> Array:
    """Logits f32[r, draft vocab] of `batch.logit_rows`; `batch.taps` becomes the head's hidden states: [t, d].

    `batch.given` are hidden states of the target, or with `own_states` of the head itself.
    """
    x = hidden_states(head, batch, kernels, storage, own_states=own_states)
    kernels.tap(x, 0, batch)
    return read_out(head, kernels.take(x, batch.logit_rows), kernels)


def read_out(head: HeadWeights, x: Array, kernels: KernelSet) -> Array:
    """Logits f32[r, draft vocab] of rows of the head's hidden states."""
    normed = kernels.norm(x, head.final_norm)
    return kernels.logits(normed, head.head, head.config.logit_softcap)  # type: ignore[arg-type]  # set by `prepare_head`


def hidden_states(
    head: HeadWeights, batch: Batch, kernels: KernelSet, storage: Storage | None, *, own_states: bool
) -> Array:
    """[t, d]: the head's hidden states, before its last norm.

    Rotations come first: on a GPU a kernel may read results from before the first product without a wait.
    """
    config, layer = head.config, head.layer
    rotations = tuple(
        kernels.rotation(frequencies, scale, batch.positions)
        for frequencies, scale in zip(head.inverse_frequencies, head.rope_scales, strict=True)
    )
    hidden = kernels.given(batch, config.hidden_size if own_states else head.states_width)
    if own_states:
        hidden = kernels.norm(hidden, head.final_norm) if head.chains_normed else hidden
    elif head.merge is not None:
        hidden = kernels.linear(hidden, head.merge)
    elif head.state_norm is not None:
        hidden = kernels.norm(hidden, head.state_norm)
    normed = kernels.norm(hidden, head.hidden_norm)
    tokens = kernels.norm(kernels.embed(head.embedding, batch.token_ids, config.embedding_scale), head.token_norm)
    x = kernels.add(kernels.linear(tokens, head.token_part), kernels.linear(normed, head.hidden_part))
    if head.kind == "eagle":
        mixed = _attention_of(layer, x, batch, kernels, storage, rotations)
        x = normed if head.norms_residual else hidden
    else:
        inputs = x if layer.attention_norm is None else kernels.norm(x, layer.attention_norm)
        mixed = PagedAttentionLayer(layer)(inputs, batch, kernels, storage, rotations)
    if layer.mlp_norm is None:
        x = normed = kernels.add(x, mixed)
    else:
        x, normed = kernels.add_norm(x, mixed, layer.mlp_norm)
    return kernels.add(x, feed_forward(layer, normed, config.activation, config.gated_mlp, batch, kernels, x))


def _attention_of(
    layer: LayerWeights,
    qkv: Array,
    batch: Batch,
    kernels: KernelSet,
    storage: Storage | None,
    rotations: tuple[Rotation, ...],
) -> Array:
    """Attention whose queries, keys and values are computed already."""
    heads = kernels.rope_and_write(
        qkv, layer.shape, None if layer.rope is None else rotations[layer.rope], batch, storage
    )
    return joined(kernels.attend(heads, layer.shape, batch.segments, storage), layer.output, batch, kernels)


def split_columns(matrix: QuantizedTensor, at: int) -> tuple[QuantizedTensor, QuantizedTensor]:
    """The columns before and from `at` on, as matrices of their own; a border within a block makes them F32."""
    if at % matrix.format.block_elements:
        matrix = matrix.converted(QuantFormat.F32)
    held = matrix.held()
    parts = held.select_columns(0, at), held.select_columns(at, matrix.shape[1])
    return tuple(replace(part, data=np.ascontiguousarray(part.data)) for part in parts)  # type: ignore[return-value]


def rounded_like(head: HeadWeights, target: ModelWeights) -> HeadWeights:
    """The head with matrices in Q8_0 beside a quantised target: drafts only have to be right most of the time."""
    if not any(format.is_quantized for format in target.formats()):
        return head

    def rounded(linear: Linear) -> Linear:
        return replace(linear, parts=tuple(_in_bytes(part) for part in linear.parts))

    layer = head.layer
    return replace(
        head,
        merge=None if head.merge is None else rounded(head.merge),
        token_part=rounded(head.token_part),
        hidden_part=rounded(head.hidden_part),
        layer=replace(layer, output=rounded(layer.output), up=rounded(layer.up), down=rounded(layer.down)),
        head=None if head.head is None else rounded(head.head),
    )


def _in_bytes(matrix: QuantizedTensor | Array) -> QuantizedTensor | Array:
    if not isinstance(matrix, QuantizedTensor) or matrix.format.is_quantized:
        return matrix
    fits = matrix.shape[-1] % QuantFormat.Q8_0.block_elements == 0
    return matrix.converted(QuantFormat.Q8_0) if fits else matrix


def default_taps(num_layers: int) -> tuple[int, ...]:
    """The layers that published EAGLE-3 heads read where their configuration names none: low, middle, high."""
    return (2, num_layers // 2, num_layers - 3)
