"""The operations of networks with several residual streams, inputs of each layer, or sparse activations.

The streams of a token lie side by side in one row: |<- stream 0 ->|<- stream 1 ->| ... |, each of d values.
"""

from __future__ import annotations

from typing import Any, Protocol

from bifolio.kernels.operands import Array, Norm

LEAST_MEAN_SQUARE = 1e-5  # of a stream that is scaled


class StreamOperations(Protocol):
    """A part of `KernelSet`."""

    def add_scaled(self, x: Array, y: Array, scale: float) -> Array:
        """(x + y) * scale."""
        ...

    def embed_known(self, table: Any, ids: Array, scale: float) -> Array:
        """Rows of a table that lacks the last ids, which read row 0: [t, d]."""
        ...

    def norm_groups(self, x: Array, norm: Norm) -> Array:
        """The norm of each group of as many columns as the norm has weights."""
        ...

    def columns(self, x: Array, start: int, width: int, factors: Array | None = None) -> Array:
        """[t, width] from column `start` on, times f32[width] `factors`."""
        ...

    def act_gate(self, x: Array, inputs: Array, start: int, activation: str) -> Array:
        """act(x) * inputs[:, start : start + width of x]."""
        ...

    def sparse_act_mul(self, x: Array, deviations: float, activation: str) -> Array:
        """act(max(gate - cutoff, 0)) * up for [t, 2 * ffn], gate and up concatenated: [t, ffn].

        The cutoff of a token is the mean of its gates plus so many standard deviations.
        """
        ...

    def mix_streams(self, x: Array, coefficients: Array, streams: int) -> Array:
        """[t, m * d]: stream i is the sum of coefficients[:, i * streams + j] * stream j of x over all j."""
        ...

    def correct_streams(self, x: Array, y: Array, coefficients: Array, active: int) -> Array:
        """[t, n * d]: stream i of x plus coefficients[:, i] * (y - the active stream of x)."""
        ...

    def add_to_streams(self, x: Array, y: Array, first: int) -> Array:
        """[t, n * d]: y is added to each stream of x from `first` on."""
        ...

    def spread_streams(self, x: Array, y: Array) -> Array:
        """[t, (1 + n) * d]: x, and the n streams of y scaled to the root mean square of x."""
        ...

    def merge_streams(self, x: Array, y: Array) -> Array:
        """[t, d]: the mean of x and of the streams of y scaled to the root mean square of x."""
        ...
