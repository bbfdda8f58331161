"""The sizes that passes are captured for: others are padded to the next."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

SEQUENCES = (1, 2, 4, 8, 16, 32)  # of steps with drafts
# Steps of an encoder by fours of a power of two: little padding.
TEXT_TOKENS = 16, 32, 64, 128, *(share << bits for bits in range(6, 12) for share in (4, 5, 6, 7)), 16384


class Sizes(NamedTuple):
    """Steps with prompts or texts that are captured."""

    tokens: tuple[int, ...]
    max_prompts: int

    def most_tiles(self, num_tokens: int, rows: int) -> int:
        """Tiles of any prompts with this number of tokens together."""
        return num_tokens // rows + self.max_prompts


SMALL = (4, 8, 16)  # tokens of a few sequences with drafts
# Not 448: cuBLAS takes longer for it than for 512 with some large matrices.
PROMPTS = Sizes((32, 64, 128, 192, 256, 320, 384, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048), 32)
HEAD_PROMPTS = Sizes((4, 8, 16, 32, 64, 128, 256), 32)  # of a draft head
TEXTS = Sizes(TEXT_TOKENS, 256)
# Triton's interpreter takes long for unused tiles.
INTERPRETED, INTERPRETED_HEAD = Sizes((8, 24), 3), Sizes((8, 24), 4)


def sequence_sizes(most: int) -> tuple[int, ...]:
    """Numbers of sequences of steps with drafts, up to the one that `most` sequences are padded to."""
    return SEQUENCES[: bisect_left(SEQUENCES, min(most, SEQUENCES[-1])) + 1]


def padded(sizes: Sequence[int], count: int) -> int:
    """The smallest of the sizes that has room."""
    return sizes[bisect_left(sizes, count)]


def batch_sizes(most: int) -> list[int]:
    """Numbers of decodes."""
    return _up_to(most, [1, 2, 4, 8, 16, 24, *range(32, 256, 16), 256, *range(320, max(most, 320) + 64, 64)])


def few_batch_sizes(most: int) -> list[int]:
    """Fewer numbers of decodes, of rarer steps: all of them are captured at the start too."""
    return _up_to(most, [8, 16, 32, 48, 64, 96, 128, 192, 256, *range(384, max(most, 384) + 128, 128)])


def draw_sizes(most: int) -> list[int]:
    """Numbers of draws from given logits."""
    return _up_to(most, [1, 2, 4, 8, 16, 24, 32, 48, *range(64, max(most, 64) + 32, 32)])


def _up_to(most: int, sizes: list[int]) -> list[int]:
    return [*(size for size in sizes if size < most), most]
