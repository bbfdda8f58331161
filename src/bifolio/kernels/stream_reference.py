"""The definitions of `StreamOperations`, written once against the array API, for numpy arrays and torch tensors."""

from __future__ import annotations

from typing import Any

from bifolio.arrays import array_namespace
from bifolio.kernels.interface import Array, KernelSet, Norm
from bifolio.kernels.stream_interface import LEAST_MEAN_SQUARE


class StreamReference:
    """A part of kernel sets whose arrays are numpy's or torch's."""

    def add_scaled(self, x: Array, y: Array, scale: float) -> Array:
        return (x + y) * scale

    def embed_known(self: KernelSet, table: Any, ids: Array, scale: float) -> Array:
        return self.embed(table, ids * (ids < table.shape[0]), scale)

    def norm_groups(self: KernelSet, x: Array, norm: Norm) -> Array:
        xp = array_namespace(x)
        return xp.reshape(self.norm(xp.reshape(x, (-1, norm.weight.shape[0])), norm), x.shape)

    def columns(self, x: Array, start: int, width: int, factors: Array | None = None) -> Array:
        part = x[:, start : start + width]
        return part if factors is None else array_namespace(x).astype(part * factors, x.dtype)

    def act_gate(self: KernelSet, x: Array, inputs: Array, start: int, activation: str) -> Array:
        return self.act(x, activation) * inputs[:, start : start + x.shape[-1]]

    def sparse_act_mul(self: KernelSet, x: Array, deviations: float, activation: str) -> Array:
        xp, half = array_namespace(x), x.shape[-1] // 2
        gate, up = x[:, :half], x[:, half:]
        mean = xp.mean(gate, axis=-1, keepdims=True)
        spread = xp.sqrt(xp.mean((gate - mean) ** 2, axis=-1, keepdims=True))
        return self.act(xp.clip(gate - (mean + spread * deviations), 0.0, None), activation) * up

    def mix_streams(self, x: Array, coefficients: Array, streams: int) -> Array:
        xp = array_namespace(x)
        mixed = xp.reshape(coefficients, (len(x), -1, streams)) @ xp.reshape(x, (len(x), streams, -1))
        return xp.reshape(mixed, (len(x), mixed.shape[1] * mixed.shape[2]))

    def correct_streams(self, x: Array, y: Array, coefficients: Array, active: int) -> Array:
        xp = array_namespace(x)
        rows = xp.reshape(x, (len(x), coefficients.shape[-1], y.shape[-1]))
        return xp.reshape(rows + coefficients[:, :, None] * (y - rows[:, active])[:, None, :], x.shape)

    def add_to_streams(self, x: Array, y: Array, first: int) -> Array:
        xp, kept = array_namespace(x), first * y.shape[-1]
        rest = xp.reshape(x[:, kept:], (len(x), -1, y.shape[-1])) + y[:, None, :]
        return xp.concat([x[:, :kept], xp.reshape(rest, (len(x), x.shape[-1] - kept))], axis=-1)

    def spread_streams(self, x: Array, y: Array) -> Array:
        xp = array_namespace(x)
        return xp.concat([x, xp.reshape(_matched(x, y), y.shape)], axis=-1)

    def merge_streams(self, x: Array, y: Array) -> Array:
        xp, streams = array_namespace(x), _matched(x, y)
        return (x + xp.sum(streams, axis=1)) / (streams.shape[1] + 1)


def _matched(x: Array, y: Array) -> Array:
    """[t, n, d]: the streams of y, scaled to the root mean square of x."""
    xp = array_namespace(x)
    streams = xp.reshape(y, (len(x), y.shape[-1] // x.shape[-1], x.shape[-1]))
    target = xp.sqrt(xp.mean(x * x, axis=-1, keepdims=True))[:, None, :]
    found = xp.mean(streams * streams, axis=-1, keepdims=True)
    return streams * (target / xp.sqrt(xp.clip(found, LEAST_MEAN_SQUARE, None)))
