"""Images in prompts: the placeholder of each becomes its text, and its rows find their tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bifolio.errors import RequestError
from bifolio.images import PromptImage
from bifolio.model.vision.tower import Picture, Pixels, Vision
from bifolio.text.roles import Parts

MAX_IMAGES = 256  # of a prompt


def expanded(parts: Parts, vision: Vision, pictures: Sequence[Picture]) -> Parts:
    """The parts of a prompt with the text of each picture in place of its placeholder.

    A placeholder that a client spelled in a text is no place for an image.
    """
    found: Parts = []
    waiting = list(pictures)
    num_places = 0
    for text, is_literal in parts:
        if is_literal or vision.placeholder not in text:
            found.append((text, is_literal))
            continue
        first, *others = text.split(vision.placeholder)
        num_places += len(others)
        pieces = [first]
        for after in others:
            pieces += [waiting.pop(0).text if waiting else vision.placeholder, after]
        found.append(("".join(pieces), False))
    _check_places(num_places, len(pictures), vision)
    return found


def expanded_ids(
    token_ids: Sequence[int], placeholder: int, vision: Vision, texts: Sequence[Sequence[int]]
) -> list[int]:
    """The tokens of a prompt with those of each picture in place of the placeholder's."""
    found: list[int] = []
    waiting = list(texts)
    num_places = 0
    for token in token_ids:
        is_place = token == placeholder
        num_places += is_place
        found += waiting.pop(0) if is_place and waiting else [token]
    _check_places(num_places, len(texts), vision)
    return found


def _check_places(num_places: int, num_images: int, vision: Vision) -> None:
    if num_places != num_images:
        raise RequestError(
            f"the prompt has {num_places} places for images and {num_images} were passed: write "
            f"{vision.placeholder!r} once for each image"
        )


def placed(token_ids: Sequence[int], vision: Vision, pictures: Sequence[Picture]) -> tuple[PromptImage, ...]:
    """The images of a prompt, each tile with the tokens that its rows replace."""
    if len(pictures) > MAX_IMAGES:
        raise RequestError(f"the prompt has {len(pictures)} images and {MAX_IMAGES} are allowed: send fewer")
    places = np.flatnonzero(np.asarray(token_ids, np.int64) == vision.row_token).astype(np.int32)
    tiles = [tile for picture in pictures for tile in picture.tiles]
    digests = [each for own in pictures for each in own.digests or [vision.digest(tile) for tile in own.tiles]]
    counts = [vision.num_rows(tile) for tile in tiles]
    if sum(counts) != len(places):
        raise RequestError(
            f"the prompt has {len(places)} tokens of images and its images have {sum(counts)}: leave the tokens "
            "inside of an image out, they are added"
        )
    ends = np.cumsum(counts)
    return tuple(
        _image_at(vision, tile, digest, places[end - count : end])
        for tile, digest, count, end in zip(tiles, digests, counts, ends, strict=True)
    )


def _image_at(vision: Vision, tile: Pixels, digest: bytes, places: NDArray[np.int32]) -> PromptImage:
    return PromptImage(tile, places, digest, vision.both_ways, vision.grid(tile))


def checked_image(vision: Vision, tile: Pixels, places: NDArray[np.int32], num_tokens: int) -> PromptImage:
    """One tile of a prompt that another process prepared."""
    is_ordered = len(places) and places[0] >= 0 and places[-1] < num_tokens and (np.diff(places) > 0).all()
    if not is_ordered or len(places) != vision.num_rows(tile):
        raise RequestError("the rows of an image do not fit its tokens: server and engine have different models")
    return _image_at(vision, tile, vision.digest(tile), places)
