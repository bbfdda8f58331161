"""How contexts are cut for decode attention: every token once, never more pieces than there is room for."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bifolio.kernels.interface import AttentionShape
from bifolio.kernels.triton.split_kv import Pieces, cut, new_pieces
from bifolio.kernels.triton.tiles import TILE

PROCESSORS = 4


def cut_into(lengths: list[int], window: int = 0) -> tuple[Pieces, dict[int, list[tuple[int, int]]]]:
    """The pieces, and by sequence the tokens [begin, end) of each in their order."""
    shape = AttentionShape(0, 8, 2, 64, 0.125, window=window or None)
    pieces = new_pieces(len(lengths), shape, "cpu", num_processors=PROCESSORS)
    cut(pieces, torch.tensor(lengths, dtype=torch.int32))
    found: dict[int, list[tuple[int, int]]] = {}
    for owner, number in zip(pieces.sequence.tolist(), pieces.number.tolist(), strict=True):
        if owner >= 0:
            start = max(lengths[owner] - window, 0) // TILE * TILE if window else 0
            begin = start + number * int(pieces.length[owner])
            found.setdefault(owner, []).append((begin, min(begin + int(pieces.length[owner]), lengths[owner])))
    return pieces, found


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 5000), min_size=1, max_size=40), st.sampled_from([0, 0, 100, 700]))
def test_every_token_is_looked_at_once(lengths: list[int], window: int) -> None:
    pieces, found = cut_into(lengths, window)
    assert int(pieces.count.sum()) <= pieces.most
    for sequence, length in enumerate(lengths):
        spans = found.get(sequence, [])
        assert len(spans) == int(pieces.count[sequence])
        first = max(length - window, 0) // TILE * TILE if window else 0
        assert [begin for begin, _ in spans[1:]] == [end for _, end in spans[:-1]]  # no gap, no overlap
        assert not length or (spans[0][0], spans[-1][1]) == (first, length)
        assert all(begin < end and begin % TILE == 0 for begin, end in spans)
    order = [int(pieces.length[owner]) for owner in pieces.sequence.tolist() if owner >= 0]
    assert order == sorted(order, reverse=True)  # the longest are begun first
    for sequence in found:
        first = int(pieces.first[sequence])
        assert pieces.sequence[first : first + len(found[sequence])].tolist() == [sequence] * len(found[sequence])


def test_contexts_are_cut_evenly() -> None:
    """A little more than a whole number of pieces leaves no remainder behind."""
    pieces, found = cut_into([2100] * 15)
    sizes = np.array([end - begin for spans in found.values() for begin, end in spans])
    assert len(sizes) == 2 * 15 <= pieces.most
    assert sizes.min() > 0.75 * sizes.max()
