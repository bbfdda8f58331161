"""The interface of the tiers below the cache to the block manager: which content is worth keeping, and when it leaves.

Every method is called under the manager's lock, by the thread that runs its verb, so it must be quick.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class BlockKeeper(Protocol):
    """Keeps copies of blocks and recurrent states under their digests."""

    def stored(self, digests: Sequence[bytes], root: bytes) -> None:
        """Consecutive blocks of the prefix `root` can be found by content from now on."""
        ...

    def leaves(self, digest: bytes, block_id: int) -> None:
        """The content of a block is about to be overwritten."""
        ...

    def state_stored(self, digest: bytes) -> None:
        """The recurrent state behind a block is worth keeping."""
        ...

    def state_leaves(self, digest: bytes, state: int) -> None:
        """The content of a checkpoint is about to be overwritten."""
        ...

    def dropped_all(self) -> None:
        """All digests are forgotten: content that was not copied yet is void."""
        ...
