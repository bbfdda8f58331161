"""The messages about branches and snapshots, which `bifolio.api.messages` has among all others."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from bifolio.images import PromptImage

BranchUse: TypeAlias = Literal["advance", "beside", "score"]  # the branch takes the output over, or stays as it is
SnapshotVerb: TypeAlias = Literal[
    "save", "restore", "list", "forget", "save_slot", "restore_slot", "erase_slot", "list_sessions", "forget_session"
]


class Image(msgspec.Struct, array_like=True):
    """One input of a vision tower in a prompt (`bifolio.images.PromptImage`)."""

    height: int
    width: int
    pixels: bytes  # u8[height, width, 3]
    places: bytes  # i32[rows]

    @classmethod
    def of(cls, image: PromptImage) -> Image:
        height, width, _ = image.pixels.shape
        return cls(height, width, image.pixels.tobytes(), image.places.astype("<i4").tobytes())

    def arrays(self) -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
        """Pixels u8[height, width, 3] and places i32[rows]; ValueError if they do not fit."""
        pixels = np.frombuffer(self.pixels, np.uint8).reshape(self.height, self.width, 3)
        return pixels, np.frombuffer(self.places, "<i4").astype(np.int32)


class BranchCall(msgspec.Struct, tag="branch", omit_defaults=True):
    """A verb on a branch (`serve.process.text_branches`), or on snapshots (`serve.process.snapshots`)."""

    id: str
    verb: Literal["open", "look", "append", "truncate", "fork", "close"] | SnapshotVerb
    name: str = ""
    owner: str = ""  # name of the tenant
    share: str = ""  # key or address of the client
    token_ids: list[int] = []
    count: int = 0  # of forks, or of tokens to keep
    to_answer: bool = False
    salt: bytes = b""
    seconds: float = 0.0  # time to live
    file: str = ""  # name of a snapshot
    cache_salt: bytes = b""  # of a snapshot, behind the salt of the key
    response: str = ""  # name of a stored response that is saved
    recompute: bool = False  # tokens of a snapshot of another arithmetic
    adapters: list[tuple[str, float]] = []  # names with factors, of a text to open, to save or to restore
    images: list[Image] = []  # of a text to open


class SnapshotSettings(msgspec.Struct, frozen=True):
    """Where snapshots of clients are kept (`serve.process.snapshots`)."""

    folder: str
    max_bytes: int  # of each key


class SnapshotInfo(msgspec.Struct, array_like=True):
    """A snapshot in a file."""

    name: str
    num_tokens: int
    num_bytes: int
    created: float
    is_response: bool = False  # a stored response that the server saved itself


class BranchReply(msgspec.Struct, tag="branch_reply", omit_defaults=True):
    """A branch, or snapshots, after a verb."""

    id: str
    names: list[str]  # its own, or those of its forks
    num_tokens: int
    num_prompt: int  # tokens before the answer
    seconds: float  # time to live
    token_ids: bytes = b""  # i32[t], where they were asked for
    blocks: list[int] = []  # of the cache that hold its tokens, where they were asked for
    snapshots: list[SnapshotInfo] = []
    adapters: list[tuple[str, float]] = []  # names with factors, as it was opened
