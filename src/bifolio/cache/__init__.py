"""The paged KV cache: who holds which block, and what is in it."""

from bifolio.cache.block_manager import BlockCopy, BlockInfo, KVCacheBlockManager
from bifolio.cache.storage import KvCacheEntry, KVStorage, Page

__all__ = ["BlockCopy", "BlockInfo", "KVCacheBlockManager", "KVStorage", "KvCacheEntry", "Page"]
