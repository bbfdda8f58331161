"""Known pictures: an image that comes again is not resized again."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest

pytest.importorskip("PIL")

from vision_models import idefics3_model, picture, qwen3_vl_model

from bifolio.errors import RequestError
from bifolio.model.loader import open_text_model
from bifolio.model.vision.pictures import Pictures, file_key
from bifolio.model.vision.tower import Picture, Vision

pytestmark = pytest.mark.full  # the models are written by transformers


class CountingVision:
    """A vision that counts the images it resizes."""

    def __init__(self, vision: Vision) -> None:
        self.vision, self.count = vision, 0

    def picture(self, pixels: Any) -> Picture:
        self.count += 1
        return self.vision.picture(pixels)

    def digest(self, tile: Any) -> bytes:
        return self.vision.digest(tile)


def new_pictures(make: Any, **options: Any) -> tuple[CountingVision, Pictures]:
    vision = open_text_model(make().folder).vision
    assert vision is not None
    counting = CountingVision(vision)
    return counting, Pictures(counting, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [qwen3_vl_model, idefics3_model])
def test_a_repeated_image_is_read_once(make: Any) -> None:
    vision, pictures = new_pictures(make)
    first = pictures.read(picture(70, 50, 1))
    plain = vision.vision.read(picture(70, 50, 1))
    assert first.text == plain.text
    assert first.digests == tuple(vision.vision.digest(tile) for tile in plain.tiles)
    assert pictures.read(np.asarray(picture(70, 50, 1))) is first
    assert pictures.read(picture(70, 50, 1).convert("RGBA")).digests == first.digests
    assert vision.count == 1
    turned = np.asarray(picture(70, 50, 1)).reshape(70, 50, 3)  # the same bytes in another size
    others = [pictures.read(turned), pictures.read(picture(70, 50, 2))]
    assert vision.count == 3
    assert len({first.digests, *(other.digests for other in others)}) == 3


def test_an_array_that_changes_later_is_another_image() -> None:
    _, pictures = new_pictures(qwen3_vl_model)
    pixels = np.zeros((64, 64, 3), np.uint8)
    first = pictures.read(pixels)
    pixels[:] = 255
    assert pictures.read(pixels).digests != first.digests
    assert not first.tiles[0].any()


def test_few_pictures_are_kept() -> None:
    vision, pictures = new_pictures(qwen3_vl_model, most_bytes=3 * 64 * 64 * 3)
    for seed in (0, 1, 2, 0, 3, 0, 1):  # 3 takes the place of 1
        pictures.read(picture(64, 64, seed))
    assert vision.count == 5
    large = pictures.read(picture(300, 300, 9))
    assert pictures.read(picture(300, 300, 9)) is large


def test_several_images_keep_their_order_and_their_error() -> None:
    vision, pictures = new_pictures(qwen3_vl_model)
    images = [picture(40 + seed, 50, seed) for seed in range(12)]
    expected = [vision.vision.read(image).tiles[0] for image in images]
    for found, tile in zip(pictures.read_all(images), expected, strict=True):
        np.testing.assert_array_equal(found.tiles[0], tile)
    with pytest.raises(RequestError, match="not 3"):
        pictures.read_all([*images, 3])


def test_files_are_decoded_once() -> None:
    vision, pictures = new_pictures(qwen3_vl_model)
    data = io.BytesIO()
    picture(64, 64, 1).save(data, "PNG")
    first = pictures.read(data.getvalue())
    assert first.digests == pictures.read(picture(64, 64, 1)).digests
    assert pictures.read(data.getvalue()) is first
    assert vision.count == 2
    with pytest.raises(RequestError, match="none of PNG"):
        pictures.read(b"no image")


def test_files_are_known_to_their_owner() -> None:
    keys = {file_key(b"data", "a"), file_key(b"data", "b"), file_key(b"more", "a"), file_key(b"\0data", "")}
    assert len(keys) == 4
