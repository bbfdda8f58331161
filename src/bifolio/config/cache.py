"""Settings of the cache of keys, values and recurrent states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast, get_args

from bifolio.errors import ConfigError

KVDtype = Literal["f32", "f16", "bf16", "fp8", "q8_0"]


def checked_kv_dtype(name: str) -> KVDtype:
    """Check the name of a type for keys and values; callers that know the kernel set resolve `auto` first."""
    *names, last = get_args(KVDtype)
    if name not in get_args(KVDtype):
        raise ConfigError(f"kv_cache_dtype (--kv-dtype) is {name!r}: pass auto, {', '.join(names)} or {last}")
    return cast(KVDtype, name)


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Settings of the KV cache: a pool of equal blocks."""

    num_blocks: int  # including block 0, the target of padding
    block_size: int = 16
    dtype: KVDtype = "f32"
    enable_prefix_caching: bool = True
    poison_free_blocks: bool = False  # debugging: fill freed blocks with NaN, so that reads of them are noticed
    num_states: int = 0  # recurrent states of hybrid models, the empty state 0 included
    checkpoint_tokens: int | None = None  # spacing of the checkpoints of recurrent states; None: by their size

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ConfigError(f"block_size must be at least 1, not {self.block_size}")
        if self.num_blocks < 2:
            raise ConfigError(f"the cache needs at least 2 blocks (one is for padding), not {self.num_blocks}")
