"""Settings of the tiers below the cache: host memory and files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bifolio.errors import ConfigError

DISK_BYTES = 16 << 30  # of files where no limit is given


@dataclass(frozen=True, slots=True)
class TierSettings:
    """Where blocks are kept when they leave the cache. At least one of the two tiers exists."""

    memory_bytes: int = 0  # of the host; 0: no tier in memory
    folder: Path | None = None  # of the files; None: no tier of files
    disk_bytes: int = DISK_BYTES

    @classmethod
    def of(cls, memory: int | None, folder: str | Path | None, disk_bytes: int | None) -> TierSettings | None:
        """Those of the three options; None where none is given."""
        if disk_bytes is not None and folder is None:
            raise ConfigError("kv_offload_disk (--kv-offload-disk) limits the files in kv_offload_dir: pass both")
        if not memory and folder is None:
            return None
        place = None if folder is None else Path(folder).expanduser()
        return cls(memory or 0, place, DISK_BYTES if disk_bytes is None else disk_bytes)

    def __post_init__(self) -> None:
        if self.memory_bytes < 0:
            raise ConfigError(f"kv_offload (--kv-offload) is {self.memory_bytes} bytes: pass a size such as 8GB")
        if self.disk_bytes < 1:
            raise ConfigError(f"kv_offload_disk (--kv-offload-disk) is {self.disk_bytes} bytes: pass one such as 8GB")
        if not self.memory_bytes and self.folder is None:
            raise ConfigError("a tier needs memory or a folder: pass kv_offload, kv_offload_dir or both")
