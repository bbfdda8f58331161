"""Snapshots: a text with its blocks in one file, which another process continues bit for bit.

    |magic 8|length u64|header as JSON|blocks ...|recurrent state|images ...|checksum 32|

The header has the tokens, the length of the prompt, the digests of model and arithmetic, the sizes of block and state,
and notes of the caller. Blocks are those of the prefix that the cache holds; the few tokens behind them are computed
again, with the same bits. Sampling noise, penalties and grammars follow from the tokens and their positions, so a
snapshot needs no state of them. The checksum covers all before it.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from bifolio.adapter_salt import salt_of_adapter
from bifolio.cache.digests import root_digest
from bifolio.engine.transfer.blocks import Arrival, Sizes, read_blocks
from bifolio.engine.transfer.states import read_state
from bifolio.errors import RequestError, SnapshotError
from bifolio.images import TEXT_ONLY, PromptImage
from bifolio.long_rope import LONG_ROPE, salt_of_rope, short_context
from bifolio.model.vision.prompt import checked_image
from bifolio.model.vision.tower import Vision

if TYPE_CHECKING:
    from bifolio.engine.engine import InferenceEngine

MAGIC = b"BIFOSNP1"
START = struct.Struct("<8sQ")
CHECKSUM_BYTES = 32
MAX_HEADER_BYTES = 64 << 20


class Tile(NamedTuple):
    """One input of a vision tower, as `bifolio.images.PromptImage` has it."""

    pixels: np.ndarray  # u8[height, width, 3]
    places: np.ndarray  # i32[rows]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A text and its blocks, in memory."""

    token_ids: list[int]
    num_prompt: int  # tokens before the answer
    model: str  # digests
    numerics: str
    root: str  # digest of the empty prefix, which carries the salt
    block_size: int
    blocks: list[np.ndarray]  # u8[block bytes] each
    state: np.ndarray | None  # u8[state bytes] behind the last block, of a hybrid
    notes: dict[str, Any]  # of the caller, such as the messages of a conversation
    adapter: str = ""  # digest of the adapter that computed the blocks; empty: the base did
    images: tuple[Tile, ...] = ()  # of the tokens

    def images_for(self, vision: Vision | None) -> tuple[PromptImage, ...]:
        """The images as a model reads them."""
        if not self.images:
            return ()
        if vision is None:
            raise SnapshotError(f"the snapshot has images, and {TEXT_ONLY.partition(':')[0]}: load it with its tower")
        count = len(self.token_ids)
        try:
            return tuple(checked_image(vision, pixels, places, count) for pixels, places in self.images)
        except RequestError as error:
            raise SnapshotError(f"the images of the snapshot do not fit its tokens: {error}") from error


def capture(
    engine: InferenceEngine,
    token_ids: Sequence[int],
    *,
    num_prompt: int | None = None,
    salt: bytes = b"",
    adapter: bytes = b"",
    images: Sequence[PromptImage] | None = None,
    notes: dict[str, Any] | None = None,
    with_blocks: bool = True,
) -> Snapshot:
    """A text with the blocks of its prefix that the cache holds; on the thread that owns the engine.

    `adapter` is the digest of the one that computed the blocks; empty: the base did. `images` are those of the tokens;
    None: they are not known, so tokens of images are refused.
    """
    tokens = list(token_ids)
    vision = engine.model.vision
    if images is None and vision is not None and vision.row_token in tokens:
        raise SnapshotError("the tokens have images that are not at hand: save the branch that holds them")
    images = images or ()
    salts, marks = _salts(engine, salt, adapter), tuple(image.mark for image in images)
    full = max(salts, key=lambda one: engine.blocks.cached_prefix_length(tokens, salt=one, marks=marks))
    blocks = read_blocks(engine, tokens, full, 0, len(tokens), marks) if with_blocks else []
    state = read_state(engine, tokens, full, len(blocks), marks)
    model, numerics = engine.digests.of(engine.model)
    return Snapshot(
        tokens, len(tokens) if num_prompt is None else num_prompt, model, numerics, root_digest(full).hex(),
        engine.blocks.block_size, blocks, state, notes or {}, adapter.hex(),
        tuple(Tile(image.pixels, image.places) for image in images),
    )  # fmt: skip


def restore(
    engine: InferenceEngine,
    snapshot: Snapshot,
    *,
    salt: bytes = b"",
    adapter: bytes | None = None,
    recompute: bool = False,
) -> int:
    """Store the blocks in the cache; the tokens that it now holds. On the thread that owns the engine.

    `adapter` is the digest of the one that the text goes on with, which must be that of the blocks; None: not known.
    Blocks of another block size, and those that have no room, are computed again by the next request, with the same
    bits. Other arithmetic gives other bits: it is refused, unless the caller asks to `recompute`.
    """
    model, numerics = engine.digests.of(engine.model)
    if snapshot.model != model:
        raise SnapshotError("the snapshot belongs to another model: load the model that it was saved with")
    vocabulary = engine.model.config.vocab_size
    if not all(type(token) is int and 0 <= token < vocabulary for token in snapshot.token_ids):
        raise SnapshotError(f"the snapshot has tokens outside the vocabulary of {vocabulary}: it cannot be used")
    if adapter is not None and adapter.hex() != snapshot.adapter:
        saved = "an adapter, or another version of it" if snapshot.adapter else "the model itself"
        raise SnapshotError(f"the snapshot was saved with {saved}: load it with the same lora_request")
    salts = _salts(engine, salt, bytes.fromhex(snapshot.adapter))
    marks = tuple(image.mark for image in snapshot.images_for(engine.model.vision))
    full = next((one for one in salts if root_digest(one).hex() == snapshot.root), None)
    if full is None:
        raise SnapshotError("the snapshot was saved under another key: load it with that one")
    if snapshot.numerics != numerics:
        if recompute:
            return 0
        raise SnapshotError(
            "the snapshot was computed by another arithmetic (version, kernels, instruction set or type of the cache), "
            "so its bits would differ: pass recompute=True (--recompute) to compute its tokens again"
        )
    sizes = Sizes.of(engine)
    has_states = engine.blocks.has_states
    if snapshot.block_size != sizes.block_size or not snapshot.blocks or has_states != (snapshot.state is not None):
        return 0
    expected = [sizes.block_bytes] * len(snapshot.blocks)
    if [block.nbytes for block in snapshot.blocks] != expected or len(expected) > sizes.num_blocks(
        len(snapshot.token_ids)
    ):
        raise SnapshotError("the snapshot has blocks of another size than its header says: save it again")
    arrival = Arrival(engine, snapshot.token_ids, full, marks=marks)
    try:
        is_whole = arrival.add(snapshot.blocks[arrival.num_blocks :])
        if snapshot.state is not None and is_whole and snapshot.state.nbytes == sizes.state_bytes:
            arrival.add_state(snapshot.state)
    finally:
        arrival.close()
    return engine.blocks.cached_prefix_length(snapshot.token_ids, salt=full, marks=marks)


# -- files -------------------------------------------------------------------------------------------------------------


def write_snapshot(path: Path, snapshot: Snapshot) -> int:
    """Write a file of mode 0600, by renaming; its bytes."""
    header = {
        "token_ids": snapshot.token_ids, "num_prompt": snapshot.num_prompt, "model": snapshot.model,
        "numerics": snapshot.numerics, "root": snapshot.root, "block_size": snapshot.block_size,
        "adapter": snapshot.adapter, "images": [[*one.pixels.shape[:2], len(one.places)] for one in snapshot.images],
        "blocks": [block.nbytes for block in snapshot.blocks],
        "state": 0 if snapshot.state is None else snapshot.state.nbytes, "notes": snapshot.notes,
    }  # fmt: skip
    body = json.dumps(header).encode()
    parts: list[Any] = [START.pack(MAGIC, len(body)), body, *(block.data for block in snapshot.blocks)]
    parts += [] if snapshot.state is None else [snapshot.state.data]
    parts += [np.ascontiguousarray(part).tobytes() for one in snapshot.images for part in (one.pixels, one.places)]
    digest, size = blake2b(digest_size=CHECKSUM_BYTES), 0
    unfinished = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        file = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(file, "wb") as out:
            for part in parts:
                digest.update(part)
                size += out.write(part)
            size += out.write(digest.digest())
        os.replace(unfinished, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(unfinished)
        raise SnapshotError(f"the snapshot {path} cannot be written ({error.strerror or error})") from error
    return size


def read_snapshot(path: Path) -> Snapshot:
    """The snapshot of a file, whose checksum and sizes are right; SnapshotError otherwise."""
    try:
        data = np.fromfile(path, np.uint8)
    except OSError as error:
        raise SnapshotError(f"the snapshot {path} cannot be read ({error.strerror or error})") from error
    try:
        return _parsed(data)
    except (ValueError, KeyError, TypeError, struct.error, RecursionError) as error:
        raise SnapshotError(f"{path} is no whole snapshot: {error}") from error


def read_header(path: Path) -> dict[str, Any]:
    """The header of a file, which is not checked; SnapshotError without one."""
    try:
        with path.open("rb") as file:
            magic, length = START.unpack(file.read(START.size))
            if magic != MAGIC or length > MAX_HEADER_BYTES:
                raise ValueError("it does not begin as one")
            return dict(json.loads(file.read(length)))
    except (OSError, ValueError, TypeError, struct.error, RecursionError) as error:
        raise SnapshotError(f"{path} is no snapshot: {error}") from error


def is_snapshot(path: Path) -> bool:
    """Whether a file begins as snapshots do."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def _parsed(data: np.ndarray) -> Snapshot:
    end = data.nbytes - CHECKSUM_BYTES
    if end < START.size or data[: len(MAGIC)].tobytes() != MAGIC:
        raise ValueError("it does not begin as one")
    if blake2b(data[:end].data, digest_size=CHECKSUM_BYTES).digest() != data[end:].tobytes():
        raise ValueError("it was cut or changed, so its checksum is wrong")
    _, length = START.unpack(data[: START.size].tobytes())
    at = START.size + length
    if length > min(MAX_HEADER_BYTES, end):
        raise ValueError("its header is longer than the file")
    header = json.loads(data[START.size : at].tobytes())
    blocks = []
    for size in header["blocks"]:
        blocks.append(data[at : at + int(size)])
        at += int(size)
    state = data[at : at + int(header["state"])] if header["state"] else None
    at, num_tokens, images = at + int(header["state"]), len(header["token_ids"]), []
    for height, width, count in header.get("images", ()):
        middle = at + int(height) * int(width) * 3
        pixels, places = data[at:middle], data[middle : middle + 4 * int(count)]
        images.append(Tile(pixels.reshape(int(height), int(width), 3), places.copy().view("<i4").astype(np.int32)))
        at = middle + places.nbytes
    if at != end or not 0 <= int(header["num_prompt"]) <= num_tokens or not num_tokens:
        raise ValueError("its sizes do not add up")
    return Snapshot(
        list(header["token_ids"]), int(header["num_prompt"]), str(header["model"]), str(header["numerics"]),
        str(header["root"]), int(header["block_size"]), blocks, state, dict(header["notes"]),
        bytes.fromhex(header.get("adapter", "")).hex(), tuple(images),
    )  # fmt: skip


def _salts(engine: InferenceEngine, salt: bytes, adapter: bytes) -> list[bytes]:
    """The salts of block digests that a key may have: two for models with two sets of rotation frequencies."""
    ropes = [None] if short_context(engine.model.config) is None else [0, LONG_ROPE]
    return [salt_of_adapter(adapter, salt_of_rope(rope, salt)) for rope in ropes]
