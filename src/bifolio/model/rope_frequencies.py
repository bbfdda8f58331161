"""Constants of positions: the frequencies of rope, the slopes of linear biases, and those of lightning attention."""

from __future__ import annotations

import numpy as np

from bifolio.config import RopeConfig


def inverse_frequencies(rope: RopeConfig) -> tuple[np.ndarray, float]:
    """Rotation per position of each pair (radians), f32[rotary_dim/2], and the factor on cos and sin.

    f32[2, rotary_dim/2] for a rope with two sets: short, long.
    """
    half = np.arange(0, rope.rotary_dim, 2, dtype=np.float32) / np.float32(rope.rotary_dim)
    frequencies = (1.0 / np.power(np.float32(rope.theta), half)).astype(np.float32)
    if rope.scaling == "linear":
        frequencies = frequencies / np.float32(rope.factor)
    elif rope.scaling == "llama3":
        frequencies = _llama3_frequencies(frequencies, rope)
    elif rope.scaling == "yarn":
        frequencies = _yarn_frequencies(frequencies, rope)
    if rope.has_two_sets:
        long = rope.frequency_factors or (1.0,) * len(frequencies)
        frequencies = frequencies / np.array([rope.frequency_factors_short, long], dtype=np.float32)
    elif rope.frequency_factors:
        frequencies = frequencies / np.asarray(rope.frequency_factors, dtype=np.float32)
    return frequencies.astype(np.float32), rope.attention_factor


def _llama3_frequencies(frequencies: np.ndarray, rope: RopeConfig) -> np.ndarray:
    """Divide low frequencies by the factor, keep high ones, blend those between."""
    wavelengths = 2 * np.pi / frequencies
    low = rope.original_max_position / rope.low_freq_factor
    high = rope.original_max_position / rope.high_freq_factor
    span = rope.high_freq_factor - rope.low_freq_factor or 1.0  # 0: no frequency lies between
    blend = (rope.original_max_position / wavelengths - rope.low_freq_factor) / span
    blended = (1 - blend) * frequencies / rope.factor + blend * frequencies
    scaled = np.where(wavelengths > low, frequencies / rope.factor, frequencies)
    return np.asarray(np.where((wavelengths >= high) & (wavelengths <= low), blended, scaled), dtype=np.float32)


def _yarn_frequencies(frequencies: np.ndarray, rope: RopeConfig) -> np.ndarray:
    """Interpolate low frequencies, keep high ones, with a linear ramp between."""

    def dimension(rotations: float) -> float:
        """The dimension that completes `rotations` rotations over the original context."""
        turns = rope.original_max_position / (rotations * 2 * np.pi)
        return float(rope.rotary_dim * np.log(turns) / (2 * np.log(rope.theta)))

    first, last = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        first, last = float(np.floor(first)), float(np.ceil(last))
    low, high = max(first, 0), min(last, rope.rotary_dim - 1)
    ramp = np.clip((np.arange(len(frequencies), dtype=np.float32) - low) / max(high - low, 0.001), 0, 1)
    return np.asarray(frequencies / rope.factor * ramp + frequencies * (1 - ramp), dtype=np.float32)


def alibi_slopes(num_heads: int, largest: float) -> np.ndarray:
    """f32[num_heads]: powers of one base for the first heads, up to a power of 2, and those between them for others."""
    whole = 1 << (num_heads.bit_length() - 1)
    first = 2.0 ** (-largest / whole * np.arange(1, whole + 1))
    others = 2.0 ** (-largest / (2 * whole) * np.arange(1, 2 * (num_heads - whole) + 1, 2))
    return np.concatenate([first, others]).astype(np.float32)


def lightning_slopes(num_heads: int, layer: int, num_layers: int) -> np.ndarray:
    """f32[num_heads]: how fast the states of heads decay in lightning attention; those of upper layers are slower."""
    share = 1 - layer / (num_layers - 1 + 1e-5) + 1e-5
    return (2.0 ** (-8 / num_heads * np.arange(1, num_heads + 1)) * share).astype(np.float32)
