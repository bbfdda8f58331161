"""Attention of a pass: a kernel for each segment, over arrays that are laid out once and used by every layer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import triton

from bifolio.errors import PhaseError
from bifolio.kernels.cuda.row_attention import FEW_SEQUENCES, can_attend, can_fuse, row_attention
from bifolio.kernels.interface import (
    Array,
    AttentionPhase,
    AttentionSegment,
    AttentionShape,
    Heads,
    Rotation,
    Storage,
)
from bifolio.kernels.torch_arrays import upload
from bifolio.kernels.torch_attention import attend_both_ways, scale_by_position
from bifolio.kernels.triton.decode import decode_attention
from bifolio.kernels.triton.latent_attention import (
    QUERIES,
    fixed_decode,
    has_latents,
    planned_attention,
    prompt_attention,
)
from bifolio.kernels.triton.long_attention import (
    LongQueries,
    can_be_long,
    long_attention,
    long_queries,
    warm_up_long,
)
from bifolio.kernels.triton.pass_rows import PassRows
from bifolio.kernels.triton.prefill import (
    cudnn_attention,
    fixed_rows,
    prefill_attention,
    tile_rows,
    uses_cudnn,
)
from bifolio.kernels.triton.query_tiles import QueryTiles, cut_queries
from bifolio.kernels.triton.shared_attention import SharedRows, shared_attention
from bifolio.kernels.triton.split_kv import Parts, Pieces, cut, most_pieces, new_parts, new_pieces
from bifolio.kernels.triton.tiles import LARGE_HEAD, prefill_tile, product_dtype


@dataclass(slots=True)
class StagedSegment:
    """The device arrays of a segment; created once per pass, used by every layer."""

    segment: AttentionSegment
    lengths: torch.Tensor | None = None  # i32[s]
    table_rows: torch.Tensor | None = None  # i32[s]
    pieces: dict[int, Pieces] = field(default_factory=dict)  # by `AttentionShape.reach`
    tiles: dict[int, QueryTiles] = field(default_factory=dict)  # by rows of a tile
    is_cut: bool = False  # the pieces were computed before the first layer
    shared: SharedRows | None = None
    positions: torch.Tensor | None = None  # i32[t]  of the queries; None: from the segment
    has_all_tiles: bool = False  # a CUDA graph reads no other tiles than those
    is_near: bool = False  # few sequences with short contexts: there are no pieces
    long: dict[int, list[LongQueries]] = field(default_factory=dict)  # by window: sequences that run in parts
    other_tiles: dict[tuple[int, int], QueryTiles] = field(default_factory=dict)  # of the others, by window and rows


class Attention:
    """Chooses and launches the attention kernels of a pass."""

    def __init__(self, device: str, dtype: torch.dtype, num_processors: int, *, deterministic: bool) -> None:
        self._device, self._dtype = device, dtype
        self._num_processors, self._deterministic = num_processors, deterministic
        self._staged: list[StagedSegment] = []  # of the running pass
        self._has_padding = False  # tokens of the running pass that belong to no sequence
        self._rows: tuple[tuple[AttentionSegment, ...], PassRows] | None = None  # of the running pass
        self._parts: dict[tuple[int, int], Parts] = {}  # room for parts of contexts, by heads and their width

    def can_be_near(self, num_sequences: int, shapes: tuple[AttentionShape, ...], storage: Storage) -> bool:
        """Whether decodes of so few sequences have a kernel for short contexts (up to `NEAR_TOKENS`)."""
        if self._deterministic or not self._device.startswith("cuda") or num_sequences > FEW_SEQUENCES:
            return False
        return all(can_attend(shape, self._dtype, storage.keys[shape.layer].dtype) for shape in shapes)

    def rows_of(self, segments: tuple[AttentionSegment, ...]) -> PassRows:
        """The queries of the running pass, over a cache."""
        if self._rows is None or self._rows[0] is not segments:
            staged = self._stage(segments)
            lengths, owners, tables = staged[0].lengths, staged[0].table_rows, segments[0].block_tables
            if staged[0].is_cut and lengths is not None and owners is not None and tables is not None:  # captured
                rows = PassRows(lengths, tables, owners, None, segments[0].max_context_len)
            else:
                rows = PassRows.of_segments(segments, self._device)
            self._rows = segments, rows
        return self._rows[1]

    def turns_heads(
        self,
        shape: AttentionShape,
        rotation: Rotation | None,
        segments: tuple[AttentionSegment, ...],
        storage: Storage | None,
    ) -> bool:
        """Whether attention of this pass norms and rotates heads itself, and writes keys and values."""
        is_near = len(self._staged) == len(segments) == 1 and self._staged[0].is_near
        if not is_near or storage is None or self._staged[0].segment is not segments[0]:
            return False
        return can_fuse(shape, rotation, storage)

    def attend(
        self, heads: Heads, shape: AttentionShape, segments: tuple[AttentionSegment, ...], storage: Storage | None
    ) -> Array:
        """[t, heads * dim]; 0 for padding."""
        staged = self._stage(segments)
        near, tables = staged[0], staged[0].segment.block_tables
        if near.is_near and storage is not None and tables is not None:
            assert near.table_rows is not None
            assert near.lengths is not None
            return row_attention(heads.query, shape, storage, tables, near.table_rows, near.lengths)
        if len(segments) == 1:
            return self._attend(heads, shape, staged[0], storage)
        new = heads.query.new_zeros if self._has_padding else heads.query.new_empty
        out = new((heads.query.shape[0], shape.num_heads * shape.head_dim))
        for part in staged:
            rows = out[part.segment.token_start : part.segment.token_end]
            found = self._attend(heads, shape, part, storage, rows)
            if found is not rows:
                rows.copy_(found)
        return out

    def _attend(
        self,
        heads: Heads,
        shape: AttentionShape,
        staged: StagedSegment,
        storage: Storage | None,
        out: torch.Tensor | None = None,  # output of our own kernels
    ) -> torch.Tensor:
        segment = staged.segment
        if segment.phase is AttentionPhase.DECODE and (storage is None or segment.block_tables is None):
            raise PhaseError("decode reads the cache: pass a storage and block tables")
        is_cached = storage is not None and segment.block_tables is not None
        reads_back = is_cached and not shape.bidirectional  # whole texts are not in the cache
        if reads_back and (self._deterministic or (storage is not None and storage.is_read_back)):
            segment = replace(segment, fresh=False)  # chunks also read the cache
        tokens = slice(segment.token_start, segment.token_end)
        own = Heads(*(None if part is None else part[tokens] for part in heads))
        own = own._replace(query=scale_by_position(own.query, shape, segment, staged.positions))
        if not shape.is_causal(segment):
            return attend_both_ways(own, shape, segment, storage)
        query = own.query
        if segment.block_tables is not None and storage is not None and has_latents(shape, storage):
            segment = replace(segment, fresh=False)  # keys are read where they were just written
        if storage is None or segment.block_tables is None or segment.fresh:
            if uses_cudnn(query, shape, segment, storage) and not self._deterministic:
                return cudnn_attention(own, shape, segment.num_sequences)
        elif segment.max_query_len == 1 and segment.phase is AttentionPhase.DECODE:
            return self._decode(query, shape, staged, storage, out)
        if out is None:
            out = query.new_empty((query.shape[0], shape.num_heads * shape.head_dim))
        long = self._attend_long(query, shape, staged, storage, out)
        if len(long) < segment.num_sequences:
            rows = self.rows_of_tile(shape, segment, query.dtype, storage)
            tiles = self._tiles(staged, segment, rows, shape.reach, long)
            if storage is not None and segment.block_tables is not None and has_latents(shape, storage):
                prompt_attention(
                    query, shape, storage, self._integers(segment.block_tables), tiles, segment.max_context_len, out,
                    num_processors=self._num_processors, fixed=self._deterministic,
                )  # fmt: skip
                return out
            prefill_attention(own, shape, segment, storage, tiles, rows, out, fixed=self._deterministic)
        return out

    def _attend_long(
        self,
        query: torch.Tensor,
        shape: AttentionShape,
        staged: StagedSegment,
        storage: Storage | None,
        out: torch.Tensor,
    ) -> list[LongQueries]:
        """Compute the sequences whose attention runs in parts, and return them. A captured step has none."""
        tables = staged.segment.block_tables
        if staged.has_all_tiles or self._deterministic or storage is None or tables is None or shape.bidirectional:
            return []
        if not can_be_long(query, shape, storage):
            return []
        window = shape.reach
        if window not in staged.long:
            staged.long[window] = long_queries(staged.segment, shape.window)
        for item in staged.long[window]:
            long_attention(query, shape, storage, self._integers(tables)[item.sequence], item, out)
        return staged.long[window]

    def _tiles(
        self, staged: StagedSegment, segment: AttentionSegment, rows: int, window: int, long: list[LongQueries]
    ) -> QueryTiles:
        """Tiles of all sequences that are not `long`."""
        if long:
            key = window, rows
            if key not in staged.other_tiles:
                skipped = [item.sequence for item in long]
                staged.other_tiles[key] = cut_queries(segment, rows, self._device, skipped)
            return staged.other_tiles[key]
        if rows not in staged.tiles:
            if staged.has_all_tiles:
                raise PhaseError(f"a step of fixed size has no tiles of {rows} queries for {self._dtype}")
            staged.tiles[rows] = cut_queries(segment, rows, self._device)
        return staged.tiles[rows]

    def warm_up(self, shapes: tuple[AttentionShape, ...], storage: Storage, max_context: int, max_queries: int) -> None:
        """Build the plans of long attention, once for each kind of layer."""
        if self._deterministic:
            return
        query = torch.empty(0, dtype=self._dtype, device=self._device)
        kinds = {
            (shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.scale): shape
            for shape in shapes
            if can_be_long(query, shape, storage)
        }
        for shape in kinds.values():
            longest = max_context if shape.window is None else min(max_context, shape.window)
            warm_up_long(shape, self._dtype, self._device, longest, max_queries)

    def rows_of_tile(
        self, shape: AttentionShape, segment: AttentionSegment, dtype: torch.dtype, storage: Storage | None
    ) -> int:
        """Queries of a tile of prefill attention."""
        if segment.block_tables is not None and has_latents(shape, storage):
            return QUERIES
        if not self._deterministic:
            return tile_rows(dtype, shape, segment.max_query_len)
        cached = None if storage is None or segment.block_tables is None else storage.keys[shape.layer]
        dtype = dtype if cached is None else product_dtype(dtype, cached.dtype)
        return fixed_rows(dtype, shape, segment.max_query_len)

    def _decode(
        self,
        query: torch.Tensor,
        shape: AttentionShape,
        staged: StagedSegment,
        storage: Storage,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        segment = staged.segment
        if staged.lengths is None:
            staged.lengths = self._integers(segment.context_lens)
            staged.table_rows = torch.arange(segment.num_sequences, dtype=torch.int32, device=self._device)
        window = shape.reach
        latents, tables = has_latents(shape, storage), self._integers(segment.block_tables)
        if out is None and latents:
            out = query.new_empty((query.shape[0], shape.num_heads * shape.head_dim))
        if out is not None and latents and self._deterministic:
            assert staged.table_rows is not None
            longest = segment.max_context_len
            fixed_decode(query, shape, storage, tables, staged.table_rows, staged.lengths, longest, out)
            return out
        pieces = staged.pieces.get(window)
        if pieces is None:
            pieces = self._new_pieces(segment, shape)
            cut(pieces, staged.lengths)
            staged.pieces[window] = pieces
        assert staged.table_rows is not None
        if out is not None and latents:
            planned_attention(query, shape, storage, tables, staged.table_rows, staged.lengths, pieces, out)
            return out
        shared = staged.shared if window == 0 else None
        if shared is not None:
            shared_attention(query, shape, storage, tables, staged.table_rows, shared)
        fixed = {}
        if self._deterministic:
            dtype = product_dtype(query.dtype, storage.keys[shape.layer].dtype)
            rows = max(fixed_rows(dtype, shape, 1), triton.next_power_of_2(shape.num_heads // shape.num_kv_heads))
            fixed = {"fixed_rows": rows, "warps": 4, "tile": prefill_tile(shape.head_dim, dtype)}
        return decode_attention(
            query, shape, storage, tables, staged.table_rows, staged.lengths, pieces, out=out,
            shared=None if shared is None else (shared.words, shared.mixed, shared.weight), overlapped=staged.is_cut,
            num_processors=self._num_processors, **fixed,
        )  # fmt: skip

    def stage_decode(
        self,
        segment: AttentionSegment,  # one query each; lengths and tables on the device
        table_rows: torch.Tensor,  # i32[s]
        pieces: dict[int, Pieces],  # by `AttentionShape.reach`; kept by the caller, since a CUDA graph reuses them
        shapes: tuple[AttentionShape, ...],
        storage: Storage,
        shared: SharedRows | None = None,
        *,
        is_near: bool = False,
    ) -> None:
        """Split the contexts on the device; the following layers of this pass use the result.

        `is_near`: short contexts are not split (see `can_be_near`).
        """
        if is_near:
            self._staged = [StagedSegment(segment, segment.context_lens, table_rows, is_near=True)]
            self._has_padding = False
            return
        for shape in shapes:
            window = shape.reach
            is_fixed = self._deterministic and has_latents(shape, storage)
            if window not in pieces and not (shape.top_k or is_fixed):  # those have pieces of their own
                pieces[window] = self._new_pieces(segment, shape)
        for window, part in pieces.items():
            cut(part, segment.context_lens, None if shared is None or window else shared.skipped)
        self._staged = [StagedSegment(segment, segment.context_lens, table_rows, pieces, is_cut=True, shared=shared)]
        self._has_padding = False

    def stage_prompts(
        self,
        segment: AttentionSegment,  # of all tokens; tables on the device
        tiles: dict[int, QueryTiles],  # by their rows: of all shapes
        positions: torch.Tensor,  # i32[t]
    ) -> None:
        """Add prompts to the decodes of `stage_decode`; tokens of neither are padding."""
        self._staged.append(StagedSegment(segment, tiles=tiles, positions=positions, has_all_tiles=True))
        self._has_padding = True

    def stage_texts(self, segment: AttentionSegment, tiles: dict[int, QueryTiles]) -> None:
        """Whole texts, `tiles` by their rows, for a step that is captured; tokens in no tile are padding."""
        self._staged = [StagedSegment(segment, tiles=tiles, has_all_tiles=True)]
        self._has_padding = False

    def _new_pieces(self, segment: AttentionSegment, shape: AttentionShape) -> Pieces:
        fixed_len = segment.max_context_len if self._deterministic else 0
        count, processors = segment.num_sequences, self._num_processors
        if not fixed_len and shape.head_dim <= LARGE_HEAD:
            return new_pieces(count, shape, self._device, num_processors=processors)
        most = most_pieces(count, shape, processors, fixed_len)
        key = shape.num_heads, shape.head_dim
        if key not in self._parts or len(self._parts[key][0]) < most:  # all steps use the same room, the largest first
            self._parts[key] = new_parts(most, shape, self._device)
        return new_pieces(
            count, shape, self._device, num_processors=processors, fixed_len=fixed_len, parts=self._parts[key]
        )

    def _stage(self, segments: tuple[AttentionSegment, ...]) -> list[StagedSegment]:
        """Stage the segments of a pass; all layers of a pass use the same ones."""
        known = [staged.segment for staged in self._staged]
        if len(known) != len(segments) or any(a is not b for a, b in zip(known, segments, strict=True)):
            self._staged = [StagedSegment(segment) for segment in segments]
            self._has_padding = False
        return self._staged

    # -- details ------------------------------------------------------------------------------------------------------
    def _integers(self, values: Any) -> torch.Tensor:
        if not isinstance(values, torch.Tensor):
            return upload(np.asarray(values, dtype=np.int32), self._device)
        return values.to(device=self._device, dtype=torch.int32)
