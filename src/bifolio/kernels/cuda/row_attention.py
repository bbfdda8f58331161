"""Launches of `row_attention.cu`: decode attention of few sequences with short contexts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bifolio.kernels.cuda import nvrtc
from bifolio.kernels.interface import AttentionShape, Norm, Rotation, Storage

FEW_SEQUENCES = 2
NEAR_TOKENS = 1024  # contexts up to here; longer ones are faster when divided among all multiprocessors
WARPS = 8  # of a thread block
CLUSTER = 8  # thread blocks of a cluster
HEAD_DIMS = (64, 128, 256)
LANE_DIMS = 8  # dimensions that a lane holds
MOST_GROUP, MOST_SETS = 4, 4  # query heads of a cluster, clusters of a key head
LOG2_E = 1.4426950408889634


@dataclass(slots=True)
class RawHeads:
    """Queries, keys and values of one token of each sequence, which attention norms, rotates and writes itself."""

    qkv: torch.Tensor  # bf16[s, (heads + 2 * kv_heads) * dim]
    rotation: Rotation | None  # f32[s, half of the rotated dimensions]


def group_of(shape: AttentionShape) -> int:
    """Query heads of a cluster: the largest divisor that fits into registers."""
    heads = shape.num_heads // shape.num_kv_heads
    return max(size for size in range(1, MOST_GROUP + 1) if heads % size == 0)


def can_attend(shape: AttentionShape, dtype: torch.dtype, cache_dtype: torch.dtype) -> bool:
    """Whether this kernel attends with heads of such a shape, in these dtypes."""
    if dtype != torch.bfloat16 or cache_dtype != torch.bfloat16 or shape.head_dim not in HEAD_DIMS:
        return False
    if shape.window is not None or shape.softcap or shape.temperature:
        return False
    if shape.sinks is not None or shape.slopes is not None or shape.top_k:
        return False
    return shape.num_heads // shape.num_kv_heads // group_of(shape) <= MOST_SETS and nvrtc.works()


def can_fuse(shape: AttentionShape, rotation: Rotation | None, storage: Storage) -> bool:
    """Whether the kernel also norms and rotates such heads, and writes keys and values."""
    if shape.value_norm is not None or shape.norm_after_rope or shape.queries_only or storage.layout.shared_values:
        return False
    if rotation is not None and (shape.rope_interleaved or rotation.cos.shape[-1] % LANE_DIMS):
        return False
    query_norm, key_norm = shape.query_norm, shape.key_norm
    if query_norm is None or key_norm is None:
        return query_norm is key_norm
    is_alike = query_norm.weight.dtype == key_norm.weight.dtype
    return is_alike and _is_plain(query_norm, shape) and _is_plain(key_norm, shape)


def _is_plain(norm: Norm, shape: AttentionShape) -> bool:
    known = torch.float32, torch.bfloat16
    is_of_head = norm.weight.shape[0] == shape.head_dim and norm.weight.dtype in known
    return is_of_head and norm.bias is None and not norm.centered


def row_attention(
    heads: RawHeads | torch.Tensor,  # or bf16[s, heads, dim]: rotated queries; keys and values are in the cache
    shape: AttentionShape,
    storage: Storage,
    tables: torch.Tensor,  # i32[rows, max_blocks]
    table_rows: torch.Tensor,  # i32[s]
    lengths: torch.Tensor,  # i32[s]  tokens visible to the query, itself included
) -> torch.Tensor:
    """bf16[s, heads * dim]; every token but the newest of each sequence was written before the step began."""
    is_raw = isinstance(heads, RawHeads)
    rows = heads.qkv if isinstance(heads, RawHeads) else heads
    rotation = heads.rotation if isinstance(heads, RawHeads) else None
    group = group_of(shape)
    sets, query_norm, key_norm = shape.num_heads // group, shape.query_norm, shape.key_norm
    has_norm = is_raw and query_norm is not None and key_norm is not None
    rotary = 0 if rotation is None else 2 * rotation.cos.shape[-1]
    out = torch.empty((rows.shape[0], shape.num_heads * shape.head_dim), dtype=rows.dtype, device=rows.device)
    module = nvrtc.load_source(
        ("common", "row_attention"), torch.cuda.current_device(), DIM=shape.head_dim, GROUP=group,
        SETS=sets // shape.num_kv_heads, BLOCK_SIZE=storage.block_size, WARPS=WARPS, ROUNDS=4 if group <= 2 else 3,
        CLUSTER=CLUSTER, IS_FUSED=is_raw, HAS_NORM=has_norm, ROTARY=rotary,
        IS_NORM_WIDE=query_norm is not None and query_norm.weight.dtype == torch.float32,
    )  # fmt: skip
    unused = lengths
    norms = (query_norm.weight, key_norm.weight) if has_norm and query_norm and key_norm else (unused, unused)
    module.function("row_attention").launch(
        (CLUSTER, sets, rows.shape[0]),
        WARPS * 32,
        (
            rows, storage.keys[shape.layer], storage.values[shape.layer], tables, table_rows, lengths, *norms,
            *((unused, unused) if rotation is None else (rotation.cos, rotation.sin)), out, rows.stride(0),
            tables.stride(0), shape.scale * LOG2_E, 0.0 if query_norm is None else query_norm.eps,
        ),
        shared_bytes=WARPS * 32 * 8 * group * 4,
        pdl=True,
    )  # fmt: skip
    return out
