"""Tiers below the cache: host memory and files, where blocks are found again by their digests."""
