"""The weights of a network, by role. Kernels see these; files and torch modules fill them.

A matrix is [out, in], as it lies in the file (`QuantizedTensor`, memory-mapped) or as a torch tensor. Layers that read
the same input are parts of one `Linear`, so that a kernel set can fuse them when it prepares the weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from bifolio.config import ModelConfig, RopeConfig
from bifolio.kernels.interface import Array, AttentionShape, KernelSet, Linear, Norm
from bifolio.model.load_progress import LoadProgress
from bifolio.quant.formats import QuantFormat
from bifolio.quant.tensor import QuantizedTensor

__all__ = ["LayerWeights", "Linear", "ModelWeights", "Norm", "inverse_frequencies", "prepare"]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One transformer layer."""

    shape: AttentionShape  # with the norms of single query and key heads
    attention_norm: Norm
    qkv: Linear
    output: Linear
    post_attention_norm: Norm | None
    mlp_norm: Norm
    up: Linear  # gate and up side by side when the MLP is gated
    down: Linear
    post_mlp_norm: Norm | None
    rope: int | None  # index into ModelWeights.inverse_frequencies; None: learned positions


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """The whole network."""

    config: ModelConfig
    embedding: QuantizedTensor | Array  # [vocab, d]
    position_embedding: QuantizedTensor | Array | None  # [max_position, d]
    layers: tuple[LayerWeights, ...]
    final_norm: Norm
    head: Linear
    inverse_frequencies: tuple[Array, ...]  # f32[rotary_dim/2] for each rope configuration
    rope_scales: tuple[float, ...]  # what cos and sin are multiplied by
    prepared_for: KernelSet | None = None  # whose arrays these are; None: as they came from a file

    def matrices(self) -> list[QuantizedTensor | Array]:
        """Every matrix once, in the order of use; a matrix that is used twice (tied embeddings) is one."""
        found = [self.embedding, *([] if self.position_embedding is None else [self.position_embedding])]
        for layer in self.layers:
            found += [*layer.qkv.parts, *layer.output.parts, *layer.up.parts, *layer.down.parts]
        return list({id(matrix): matrix for matrix in [*found, *self.head.parts]}.values())

    def formats(self) -> list[QuantFormat]:
        """The format of every matrix of a file."""
        return [matrix.format for matrix in self.matrices() if isinstance(matrix, QuantizedTensor)]


def attention_shape(
    config: ModelConfig, layer: int, query_norm: Norm | None = None, key_norm: Norm | None = None
) -> AttentionShape:
    return AttentionShape(
        layer=layer,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        scale=config.scale,
        window=config.window(layer),
        rope_interleaved=config.rope_interleaved,
        query_norm=query_norm,
        key_norm=key_norm,
    )


def prepare(weights: ModelWeights, kernels: KernelSet) -> ModelWeights:
    """Hand every weight to the kernel set once, at load: it repacks, fuses, or moves it to its device."""
    if weights.prepared_for is kernels:
        return weights

    progress = LoadProgress(sum(int(getattr(matrix, "nbytes", 0)) for matrix in weights.matrices()))

    def norm(value: Norm | None) -> Norm | None:
        return None if value is None else kernels.prepare_norm(value)

    def linear(value: Linear) -> Linear:
        return progress.prepare(kernels, value)

    layers = tuple(
        replace(
            layer,
            shape=replace(layer.shape, query_norm=norm(layer.shape.query_norm), key_norm=norm(layer.shape.key_norm)),
            attention_norm=kernels.prepare_norm(layer.attention_norm),
            qkv=linear(layer.qkv),
            output=linear(layer.output),
            post_attention_norm=norm(layer.post_attention_norm),
            mlp_norm=kernels.prepare_norm(layer.mlp_norm),
            up=linear(layer.up),
            down=linear(layer.down),
            post_mlp_norm=norm(layer.post_mlp_norm),
        )
        for layer in weights.layers
    )
    positions = weights.position_embedding
    prepared = replace(
        weights,
        embedding=kernels.prepare_embedding(weights.embedding),
        position_embedding=None if positions is None else kernels.prepare_embedding(positions),
        layers=layers,
        final_norm=kernels.prepare_norm(weights.final_norm),
        head=linear(weights.head),
        inverse_frequencies=tuple(kernels.from_host(f) for f in weights.inverse_frequencies),
        prepared_for=kernels,
    )
    progress.finish()
    return prepared


def inverse_frequencies(rope: RopeConfig, max_model_len: int = 0) -> tuple[np.ndarray, float]:
    """Rotation per position of each pair, f32[rotary_dim/2], and the factor on cos and sin."""
    half = np.arange(0, rope.rotary_dim, 2, dtype=np.float32) / np.float32(rope.rotary_dim)
    frequencies = (1.0 / np.power(np.float32(rope.theta), half)).astype(np.float32)
    if rope.scaling == "linear":
        frequencies = frequencies / np.float32(rope.factor)
    elif rope.scaling == "llama3":
        frequencies = _llama3_frequencies(frequencies, rope)
    elif rope.scaling == "yarn":
        frequencies = _yarn_frequencies(frequencies, rope)
    factors = rope.frequency_factors
    if rope.scaling == "longrope" and max_model_len <= rope.original_max_position and rope.frequency_factors_short:
        factors = rope.frequency_factors_short
    if factors:
        frequencies = frequencies / np.asarray(factors, dtype=np.float32)
    return frequencies.astype(np.float32), rope.attention_factor


def _llama3_frequencies(frequencies: np.ndarray, rope: RopeConfig) -> np.ndarray:
    """Low frequencies are divided by the factor, high ones kept, those between blended."""
    wavelengths = 2 * np.pi / frequencies
    low = rope.original_max_position / rope.low_freq_factor
    high = rope.original_max_position / rope.high_freq_factor
    blend = (rope.original_max_position / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - blend) * frequencies / rope.factor + blend * frequencies
    scaled = np.where(wavelengths > low, frequencies / rope.factor, frequencies)
    return np.asarray(np.where((wavelengths >= high) & (wavelengths <= low), blended, scaled), dtype=np.float32)


def _yarn_frequencies(frequencies: np.ndarray, rope: RopeConfig) -> np.ndarray:
    """Interpolate slow dimensions, keep fast ones, with a linear ramp between."""

    def dimension(rotations: float) -> float:
        """The dimension that turns `rotations` times over the original context."""
        turns = rope.original_max_position / (rotations * 2 * np.pi)
        return float(rope.rotary_dim * np.log(turns) / (2 * np.log(rope.theta)))

    low = max(np.floor(dimension(rope.beta_fast)), 0)
    high = min(np.ceil(dimension(rope.beta_slow)), rope.rotary_dim - 1)
    ramp = np.clip((np.arange(len(frequencies), dtype=np.float32) - low) / max(high - low, 0.001), 0, 1)
    return np.asarray(frequencies / rope.factor * ramp + frequencies * (1 - ramp), dtype=np.float32)
