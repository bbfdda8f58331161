"""What one sequence holds of the cache, behind `KVCacheBlockManager`."""

from __future__ import annotations


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
