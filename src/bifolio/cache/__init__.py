"""The paged KV cache: block tables, block sharing, and views of the stored keys and values."""

from bifolio.cache.block_manager import KVCacheBlockManager
from bifolio.cache.block_pool import PADDING_BLOCK, BlockMove
from bifolio.cache.block_table import BlockTable, PageTable
from bifolio.cache.sharing import (
    BeamInfo,
    BeamSearchBlockSharing,
    BlockShareManager,
    ShareStats,
    SpeculativeDecodingSharing,
)
from bifolio.cache.storage import CacheLayout, KvCacheEntry, KVStorage, Page

__all__ = [
    "PADDING_BLOCK",
    "BeamInfo",
    "BeamSearchBlockSharing",
    "BlockMove",
    "BlockShareManager",
    "BlockTable",
    "CacheLayout",
    "KVCacheBlockManager",
    "KVStorage",
    "KvCacheEntry",
    "Page",
    "PageTable",
    "ShareStats",
    "SpeculativeDecodingSharing",
]
