"""The C allocator of a process that reads requests: memory of large ones is returned to the system at once.

By default glibc raises the size from which blocks are mapped on their own with every large block that is freed, up to
32 MiB, and keeps an arena for each thread. Large bodies and answers then leave holes in the arenas: a front end that
used 13 MiB held 104 MiB of free memory after five minutes of a soak test, and its resident size rose as with a leak.
"""

from __future__ import annotations

import asyncio
import ctypes

TRIM_THRESHOLD, MMAP_THRESHOLD, ARENA_MAX = -1, -3, -8  # parameters of mallopt(3)
LARGE_BYTES = 256 << 10  # blocks of this size are mapped on their own
FREE_BYTES = 1 << 20  # free memory at the end of an arena that is kept
NUM_ARENAS = 2
TRIM_SECONDS = 5.0


def return_large_blocks() -> bool:
    """Fix the thresholds of this process; False where the C library has no such parameters."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    wanted = ((MMAP_THRESHOLD, LARGE_BYTES), (TRIM_THRESHOLD, FREE_BYTES), (ARENA_MAX, NUM_ARENAS))
    return all([int(mallopt(name, value)) for name, value in wanted])  # noqa: C419 - all are set


async def trim_now_and_then(seconds: float = TRIM_SECONDS) -> None:
    """Return free pages in the middle of arenas, too; runs until it is cancelled."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return
    while True:
        await asyncio.sleep(seconds)
        await asyncio.to_thread(trim, 0)
