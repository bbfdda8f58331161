"""The paged KV cache: who holds which block, and what is in it."""

from bifolio.cache.block_manager import BlockInfo, KVCacheBlockManager
from bifolio.cache.block_pool import PADDING_BLOCK, BlockCopy
from bifolio.cache.storage import KvCacheEntry, KVStorage, Page

__all__ = ["PADDING_BLOCK", "BlockCopy", "BlockInfo", "KVCacheBlockManager", "KVStorage", "KvCacheEntry", "Page"]
