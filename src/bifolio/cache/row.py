"""What one sequence holds of the cache, behind `KVCacheBlockManager`."""

from __future__ import annotations

from collections.abc import Mapping

from bifolio.errors import CacheError, UnknownSequenceError


class Row:
    """An ordered list of blocks and a number of promised token slots.

    |<---- block_ids[0] ---->|<---- block_ids[1] ---->|<---- block_ids[2] ---->|
    |<------------------------ num_tokens ----------------------->|<-- room -->|
    |<------ chain[0] ------>|    (chain: the full blocks whose tokens are known and verified)
    """

    __slots__ = ("block_ids", "chain", "first_changed", "num_tokens", "publishes", "root")

    def __init__(self, root: bytes, publishes: bool) -> None:
        self.block_ids: list[int] = []
        self.num_tokens = 0  # len(block_ids) == ceil(num_tokens / block_size)
        self.root = root  # digest of the empty prefix: carries the salt
        self.chain: list[bytes] = []  # digest of each leading full block that was committed
        self.publishes = publishes  # its full blocks may be found by content
        self.first_changed = 0  # table entries from here on are not known to the device yet

    def take_changes(self) -> tuple[int, list[int]]:
        """The first entry that changed since the last call, and the entries from there on."""
        first, self.first_changed = self.first_changed, len(self.block_ids)
        return first, self.block_ids[first:]

    def mark_changed(self, index: int) -> None:
        """Entries from `index` on differ from what was last taken."""
        if index < self.first_changed:
            self.first_changed = index

    def adopt(self, block_id: int, holder: Row, block_size: int) -> None:
        """Continue with the block that `holder` has at the same index, and with what is known of it."""
        index = len(self.block_ids)
        if index == 0:
            self.root = holder.root
        self.publishes = self.publishes and holder.publishes
        if self.root == holder.root and len(self.chain) == index < len(holder.chain):
            self.chain.append(holder.chain[index])
        self.block_ids.append(block_id)
        self.num_tokens = min(holder.num_tokens, (index + 1) * block_size)
        self.mark_changed(index)


def find_row(rows: Mapping[int, Row], sequence_id: int) -> Row:
    """The sequence's row, or `UnknownSequenceError`."""
    row = rows.get(sequence_id)
    if row is None:
        raise UnknownSequenceError(f"sequence {sequence_id} holds no row: open it first")
    return row


def find_holder(rows: Mapping[int, Row], block_id: int, row: Row, block_size: int) -> Row:
    """A row that holds `block_id` right behind exactly the blocks of `row`, all of them full; else `CacheError`."""
    wanted = [*row.block_ids, block_id]
    if row.num_tokens == len(row.block_ids) * block_size:
        for holder in rows.values():
            if holder.block_ids[: len(wanted)] == wanted:
                return holder
    raise CacheError(
        f"block {block_id} cannot be shared here: no row holds it behind the same {len(row.block_ids)} full "
        "blocks; share the blocks before it first, or fork the row"
    )
