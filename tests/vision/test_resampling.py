"""Images in another size, by the native kernels: bit by bit those of Pillow."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("PIL")
pytest.importorskip("bifolio.kernels._native")

from vision_models import picture

from bifolio.model.vision.resampling import BICUBIC, BILINEAR, LANCZOS, resized_pixels

FILTERS = {"bicubic": BICUBIC, "bilinear": BILINEAR, "lanczos": LANCZOS}


@pytest.mark.parametrize("name", FILTERS)
def test_pixels_are_those_of_pillow(name: str) -> None:
    rng, count = np.random.default_rng(3), 0
    for seed in range(240):
        width, height, to_width, to_height = (int(2 ** rng.uniform(0, 8.5)) for _ in range(4))
        image = picture(width, height, seed)
        if seed % 3 == 0:  # edges between black and white, where sums leave the range of a byte
            image = image.point(lambda value: 255 * (value > 128))
        if seed % 5 == 0:
            to_width = width
        found = resized_pixels(np.asarray(image), to_height, to_width, FILTERS[name])
        if found is None:
            assert to_height < height
            continue
        count += 1
        theirs = np.asarray(image.resize((to_width, to_height), resample=FILTERS[name]))
        np.testing.assert_array_equal(found, theirs)
    assert count > 120


def test_one_edge_alone_and_no_edge() -> None:
    pixels = np.asarray(picture(40, 30))
    assert resized_pixels(pixels, 30, 40, BICUBIC) is pixels
    found = resized_pixels(pixels, 60, 40, BICUBIC)
    np.testing.assert_array_equal(found, np.asarray(picture(40, 30).resize((40, 60), resample=BICUBIC)))
    assert resized_pixels(pixels, 10, 10, 0) is None  # nearest pixel: Pillow's own
