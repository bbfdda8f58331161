"""The states of a pass on the device, and its division into tokens, which are scanned one by one, and chunks.

A decode step and drafts are scanned token by token. A prompt of at least `LONG` tokens is divided into chunks, which
`kernels.triton.chunked_scan` computes with matrix products. A chunk ends after `CHUNK` tokens or at a token whose state
is stored:

    tokens of a sequence   |<- 64 ->|<- 64 ->|<- 30 ->|<- 64 ->|<- 17 ->|
    stored states                                     s                 s

A CUDA graph reads a plan of a fixed size, `PlanSizes`: unused sequences and chunks of it are empty.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from bifolio.kernels.interface import Array, StateUse
from bifolio.kernels.torch_arrays import upload

CHUNK = 64  # tokens of a chunk, at most
LONG = 64  # tokens of a sequence that is divided, at least
FEWEST = 16  # tokens of a chunk of such a sequence, on average
COUNTED_PROGRAMS = 512  # of a scan over a plan of fixed size, about: a few for each multiprocessor
Arrays = list[np.ndarray]


@dataclass(frozen=True, slots=True)
class Spans:
    """The sequences that are scanned token by token."""

    starts: torch.Tensor  # i32[s]  first token in the pass
    ends: torch.Tensor  # i32[s]
    reads: torch.Tensor  # i32[s]
    count: torch.Tensor | None = None  # i32[1]  of the sequences; None: all of them
    one_token: bool = field(default=False, kw_only=True)  # every sequence has one, and results may depend on that


@dataclass(frozen=True, slots=True)
class Chunks:
    """The chunks of all divided sequences, one sequence after the other."""

    starts: torch.Tensor  # i32[c]  first token in the pass
    lengths: torch.Tensor  # i32[c]
    first: torch.Tensor  # i32[s]  first chunk of each divided sequence
    last: torch.Tensor  # i32[s]  the chunk after its last one
    reads: torch.Tensor  # i32[s]
    count: torch.Tensor | None = None  # i32[1]  of divided sequences; None: all of them


def programs_of(scanned: Spans | Chunks, num_tiles: int) -> int:
    """Programs that share the sequences, of each of `num_tiles` tiles: one for each if their number is known."""
    count = len(scanned.reads)
    return count if scanned.count is None else min(count, -(-COUNTED_PROGRAMS // num_tiles))


class PlanSizes(NamedTuple):
    """The plan that a CUDA graph reads: any pass with fewer sequences and at most so many tokens fits."""

    tokens: int
    sequences: int  # the last one is always empty: padding belongs to it
    chunks: int  # 0: all sequences are scanned token by token
    divided: int  # sequences in chunks

    @classmethod
    def of(cls, num_tokens: int, num_sequences: int, most_long: int, *, chunked: bool) -> PlanSizes:
        """`most_long`: sequences of more than one token, at most."""
        if not chunked or num_tokens < LONG:
            return cls(num_tokens, num_sequences + 1, 0, 0)
        return cls(num_tokens, num_sequences + 1, num_tokens // FEWEST, min(most_long, num_tokens // LONG))

    @property
    def parts(self) -> list[int]:
        """Lengths of the arrays: starts, reads, writes and sequences of tokens, spans, chunks, divided sequences.

        The numbers of spans and of divided sequences are the last two.
        """
        own = [self.sequences + 1, self.sequences, self.tokens, self.tokens]
        return [*own, *[self.sequences] * 3, *[self.chunks] * 2, *[self.divided] * 3, 1, 1]

    def words(self, use: StateUse) -> np.ndarray:
        """i32[sum(parts)]: the plan of a pass whose arrays are on the host."""
        starts, reads, writes = use.arrays()
        divided = divide(starts, reads, writes) if self.chunks else None
        none = np.zeros(0, dtype=np.int32)
        spans, chunks, long = divided or ([starts[:-1], starts[1:], reads], [none] * 2, [none] * 3)
        lengths = np.diff(starts)
        owners = np.repeat(np.arange(len(lengths)), lengths)
        counts = np.array([[len(spans[0])], [len(long[0])]])
        arrays = [starts, reads, writes, owners, *spans, *chunks, *long, *counts]
        padding = [int(starts[-1]), 0, -1, self.sequences - 1, *[0] * 10]
        words: np.ndarray = np.repeat(np.array(padding, dtype=np.int32), self.parts)
        first = 0
        for array, length in zip(arrays, self.parts, strict=True):
            words[first : first + len(array)] = array
            first += length
        return words


@dataclass(frozen=True, slots=True)
class StagedStates:
    """The states of a pass on the device, and the sequence of each token; created once for all layers."""

    use: StateUse
    starts: torch.Tensor  # i32[s + 1]
    reads: torch.Tensor  # i32[s]
    writes: torch.Tensor  # i32[t]
    sequences: torch.Tensor  # i32[t]
    spans: Spans
    chunks: Chunks | None = None  # None: all sequences are scanned token by token
    has_padding: bool = False  # some tokens belong to no sequence
    is_decode: bool = False  # every sequence has one token, and results may depend on that

    @classmethod
    def of_words(cls, words: torch.Tensor, sizes: PlanSizes) -> StagedStates:
        """Views of i32[sum(sizes.parts)] on the device, which `PlanSizes.words` fills."""
        starts, reads, writes, sequences, *planned = torch.split(words, sizes.parts)
        spans, chunks = Spans(*planned[:3], *planned[-2:-1]), Chunks(*planned[3:-2], *planned[-1:])
        use = StateUse(starts, reads, writes)
        divided = chunks if sizes.chunks else None
        return cls(use, starts, reads, writes, sequences, spans, divided, has_padding=True)

    @classmethod
    def of(cls, use: StateUse, device: str, *, chunked: bool = False) -> StagedStates:
        """`chunked`: results may depend on the lengths: decode steps have kernels of their own, and prompts are divided
        into chunks, for which the host reads the arrays of `use`."""
        starts, reads, writes = (_staged_array(part, device) for part in use.arrays())
        tokens = torch.arange(len(writes), dtype=starts.dtype, device=device)
        sequences = torch.bucketize(tokens, starts[1:], out_int32=True, right=True)
        spans, chunks = Spans(starts[:-1], starts[1:], reads), None
        if chunked and len(writes) >= LONG:
            divided = divide(*(_on_host(part) for part in use.arrays()))
            if divided is not None:
                spans, chunks = _staged(*divided, device)
        return cls(use, starts, reads, writes, sequences, spans, chunks, False, chunked and len(reads) == len(writes))


def divide(starts: np.ndarray, reads: np.ndarray, writes: np.ndarray) -> tuple[Arrays, Arrays, Arrays] | None:
    """([starts, ends, reads] of whole sequences, [starts, lengths] of chunks, [first, last, reads] of the others).

    None: no sequence is divided.
    """
    lengths = np.diff(starts)
    stored = np.flatnonzero(writes >= 0)
    whole, pieces, firsts = lengths < LONG, [], [0]
    for index in np.flatnonzero(~whole).tolist():
        start, end = int(starts[index]), int(starts[index + 1])
        inside = stored[np.searchsorted(stored, start) : np.searchsorted(stored, end)] + 1
        edges = np.unique(np.concatenate([[start], inside, [end]]))
        parts = [np.arange(a, b, CHUNK) for a, b in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)]
        chunk_starts = np.concatenate(parts)
        if len(chunk_starts) * FEWEST > end - start:
            whole[index] = True
            continue
        pieces.append((chunk_starts, np.diff(chunk_starts, append=end)))
        firsts.append(firsts[-1] + len(chunk_starts))
    if not pieces:
        return None
    chunks = [np.concatenate([piece[part] for piece in pieces]) for part in (0, 1)]
    return (
        [starts[:-1][whole], starts[1:][whole], reads[whole]],
        chunks,
        [np.array(firsts[:-1]), np.array(firsts[1:]), reads[~whole]],
    )


def _staged(whole: Arrays, chunks: Arrays, divided: Arrays, device: str) -> tuple[Spans, Chunks]:
    """All arrays in one upload."""
    arrays = [*whole, *chunks, *divided]
    joined = upload(np.concatenate(arrays).astype(np.int32), device)
    parts = torch.tensor_split(joined, np.cumsum([len(array) for array in arrays[:-1]]).tolist())
    one_token = bool((whole[1] - whole[0] == 1).all())
    return Spans(*parts[:3], one_token=one_token), Chunks(*parts[3:])


def _staged_array(array: Array, device: str) -> torch.Tensor:
    return array.to(device) if isinstance(array, torch.Tensor) else upload(np.asarray(array), device)


def _on_host(array: Array) -> np.ndarray:
    return array.cpu().numpy() if isinstance(array, torch.Tensor) else np.asarray(array)
