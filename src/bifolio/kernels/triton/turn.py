# mypy: disallow-untyped-decorators=False
"""Norm and rotation of heads inside decode attention, which also writes the new key and value to the cache.

In a captured decode step a separate kernel for them would take as long as its launch. `rope_and_write` then returns
`Unturned` heads, and `decode_attention` turns them: every piece its queries, the last piece of a sequence the new key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from bifolio.kernels.interface import AttentionShape, Rotation


@dataclass(slots=True, eq=False)
class Unturned:
    """The product of a decode step: queries, keys and values before norm, rotation and write."""

    qkv: torch.Tensor  # [s, (heads + 2 * kv_heads) * dim]
    rotation: Rotation
    index: torch.Tensor  # i64[s]  cache index of the new key and value

    def arguments(self, shape: AttentionShape) -> tuple[Any, ...]:
        """Tensors of `decode_attention`'s kernel: cosine, sine, norms, index, epsilon."""
        query_norm, key_norm = shape.query_norm, shape.key_norm
        cos, sin = self.rotation
        if query_norm is None or key_norm is None:
            return cos, sin, self.qkv, self.qkv, self.index, 0.0
        return cos, sin, query_norm.weight, key_norm.weight, self.index, query_norm.eps

    def constants(self, shape: AttentionShape) -> dict[str, Any]:
        return {
            "UNTURNED": True,
            "HAS_NORM": shape.query_norm is not None and shape.key_norm is not None,
            "NORM_AFTER": shape.norm_after_rope,
        }


TURNED: dict[str, Any] = {
    "UNTURNED": False, "HAS_NORM": False, "NORM_AFTER": False,
}  # fmt: skip


def can_be_turned_late(shape: AttentionShape, rotation: Rotation) -> bool:
    """Whether whole heads are rotated by halves, normed one by one, and used without a factor."""
    norm, dim = shape.query_norm, shape.head_dim
    if 2 * rotation.cos.shape[-1] != dim or shape.rope_interleaved or dim & (dim - 1) or dim < 32:
        return False
    return not shape.temperature and (norm is None or norm.weight.shape[0] == dim)


@triton.jit
def load_turn(
    cos: tl.tensor,  # f32[dim / 2]  of this token
    sin: tl.tensor,
    query_norm: tl.tensor,  # [dim]
    key_norm: tl.tensor,
    DIM: tl.constexpr,
    HAS_NORM: tl.constexpr,
) -> tl.tensor:
    """(cosine, sine, halves of both norms' weights), each [1, dim / 2]; independent of the previous kernel."""
    half: tl.constexpr = DIM // 2
    dim = tl.arange(0, half)
    cosine, sine = tl.load(cos + dim)[None, :], tl.load(sin + dim)[None, :]
    if HAS_NORM:
        query_first, query_second = tl.load(query_norm + dim)[None, :], tl.load(query_norm + half + dim)[None, :]
        key_first, key_second = tl.load(key_norm + dim)[None, :], tl.load(key_norm + half + dim)[None, :]
    else:
        query_first, query_second, key_first, key_second = cosine, cosine, cosine, cosine
    return cosine, sine, query_first, query_second, key_first, key_second


@triton.jit
def turn_heads(
    source: tl.tensor,  # pointers [rows]  to the first number of each head
    exists: tl.tensor,  # bool[rows]
    cosine: tl.tensor,  # f32[1, dim / 2]
    sine: tl.tensor,
    norm_first: tl.tensor,  # [1, dim / 2]
    norm_second: tl.tensor,
    eps: tl.tensor,
    DIM: tl.constexpr,
    HAS_NORM: tl.constexpr,
    NORM_AFTER: tl.constexpr,
) -> tl.tensor:
    """f32[rows, dim]: the heads, normed and rotated."""
    half: tl.constexpr = DIM // 2
    place = source[:, None] + tl.arange(0, half)[None, :]
    x = tl.load(place, mask=exists[:, None], other=0.0).to(tl.float32)
    y = tl.load(place + half, mask=exists[:, None], other=0.0).to(tl.float32)
    if HAS_NORM and not NORM_AFTER:
        inverse = (1.0 / tl.sqrt((tl.sum(x * x, axis=1) + tl.sum(y * y, axis=1)) / DIM + eps))[:, None]
        x, y = x * inverse * norm_first, y * inverse * norm_second
    turned_x, turned_y = x * cosine - y * sine, y * cosine + x * sine
    if HAS_NORM and NORM_AFTER:
        squares = tl.sum(turned_x * turned_x, axis=1) + tl.sum(turned_y * turned_y, axis=1)
        inverse = (1.0 / tl.sqrt(squares / DIM + eps))[:, None]
        turned_x, turned_y = turned_x * inverse * norm_first, turned_y * inverse * norm_second
    halves = tl.permute(tl.join(turned_x, turned_y), (0, 2, 1))
    return tl.reshape(halves, [source.shape[0], DIM])


@triton.jit
def mix_new_token(
    q: tl.tensor,  # [rows, dim]
    key: tl.tensor,  # [1, dim]
    value: tl.tensor,  # [1, dim]
    highest: tl.tensor,  # f32[rows]
    total: tl.tensor,
    mixed: tl.tensor,  # f32[rows, dim]
    scale: tl.tensor,
    CAP: tl.constexpr,
) -> tl.tensor:
    """The online softmax of `mix_tile` with one more token: (highest, total, mixed)."""
    scores = tl.sum(q.to(tl.float32) * key.to(tl.float32), axis=1)
    if CAP > 0:  # noqa: SIM108  known when the kernel is compiled
        scores = (1.0 - 2.0 / (tl.exp(2.0 * scores * scale) + 1.0)) * CAP  # tanh
    else:
        scores = scores * scale
    new_highest = tl.maximum(highest, scores)
    shrink, grow = tl.exp2(highest - new_highest), tl.exp2(scores - new_highest)
    mixed = mixed * shrink[:, None] + grow[:, None] * value.to(tl.float32)
    return new_highest, total * shrink + grow, mixed
