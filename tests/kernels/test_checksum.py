"""The checksum of blocks in files: every damage of a bit, a word or a byte order changes it."""

from __future__ import annotations

import numpy as np
import pytest

from bifolio.kernels.cpu import checksum

pytest.importorskip("bifolio.kernels._native")


@pytest.mark.parametrize("size", [0, 1, 7, 63, 64, 65, 200])
def test_every_bit_counts(size: int) -> None:
    content = np.random.default_rng(size).integers(0, 256, size).astype(np.uint8)
    expected = checksum(content)
    assert expected == checksum(content.copy())
    assert expected is not None
    assert len(expected) == 64
    for place in range(size):
        for bit in range(8):
            content[place] ^= 1 << bit
            assert checksum(content) != expected
            content[place] ^= 1 << bit
    assert checksum(content) == expected


def test_words_that_change_places_are_noticed() -> None:
    content = np.random.default_rng(0).integers(0, 256, 4096).astype(np.uint8)
    words, found = content.view(np.uint64), {checksum(content)}
    for first, second in ((0, 1), (0, 8), (3, 11), (100, 508)):
        words[[first, second]] = words[[second, first]]
        found.add(checksum(content))
    words[:] = 0
    found.add(checksum(content))
    assert len(found) == 6
