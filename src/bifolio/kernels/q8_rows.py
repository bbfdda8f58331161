"""Rows of a q8_0 cache: the values of one head as bytes, with a scale for each block of them."""

from __future__ import annotations

import numpy as np

Q8_BLOCK = 32  # values that share a scale
Q8_POISON = 0xFF  # a row of these bytes has NaN scales


def q8_row_bytes(head_dim: int) -> int:
    """Bytes of one head's row in a q8_0 cache: int8 values, then one f16 scale per 32 of them.

    |head_dim x int8|head_dim / 32 x f16|   value = scale * q

    GGML's Q8_0 with values and scales separated, so that a kernel reads the values of a row contiguously.
    """
    return head_dim + head_dim // Q8_BLOCK * 2


def q8_head_dim(row_bytes: int) -> int:
    """The head dimension of a row of `q8_row_bytes`."""
    return row_bytes // (Q8_BLOCK + 2) * Q8_BLOCK


def encode_q8_rows(values: np.ndarray) -> np.ndarray:
    """f32[..., head_dim] -> u8[..., row_bytes]."""
    blocks = np.ascontiguousarray(values, np.float32).reshape(*values.shape[:-1], -1, Q8_BLOCK)
    largest = np.abs(blocks).max(axis=-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        inverse = np.where(largest > 0, np.float32(127) / largest, np.float32(0)).astype(np.float32)
        scaled = blocks * inverse[..., None]
        quantized = np.nan_to_num(np.rint(scaled)).astype(np.int8)
        scales = (largest * np.float32(1 / 127)).astype(np.float16)
    bytes_of_values = quantized.reshape(values.shape).view(np.uint8)
    return np.concatenate([bytes_of_values, scales.view(np.uint8)], axis=-1)


def decode_q8_rows(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """u8[..., row_bytes] -> f32[..., head_dim]."""
    quantized = np.ascontiguousarray(rows[..., :head_dim]).view(np.int8).reshape(*rows.shape[:-1], -1, Q8_BLOCK)
    scales = np.ascontiguousarray(rows[..., head_dim:]).view(np.float16).astype(np.float32)
    return (quantized.astype(np.float32) * scales[..., None]).reshape(*rows.shape[:-1], head_dim)
