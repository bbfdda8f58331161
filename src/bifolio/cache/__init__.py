"""The paged KV cache: who holds which block, and what is in it."""

from bifolio.cache.block_manager import BlockInfo, KVCacheBlockManager
from bifolio.cache.block_pool import PADDING_BLOCK, BlockCopy
from bifolio.cache.block_table import BlockTable, PageTable
from bifolio.cache.sharing import (
    BeamInfo,
    BeamSearchBlockSharing,
    BlockShareManager,
    ShareStats,
    SpeculativeDecodingSharing,
)
from bifolio.cache.storage import KvCacheEntry, KVStorage, Page

__all__ = [
    "PADDING_BLOCK",
    "BeamInfo",
    "BeamSearchBlockSharing",
    "BlockCopy",
    "BlockInfo",
    "BlockShareManager",
    "BlockTable",
    "KVCacheBlockManager",
    "KVStorage",
    "KvCacheEntry",
    "Page",
    "PageTable",
    "ShareStats",
    "SpeculativeDecodingSharing",
]
