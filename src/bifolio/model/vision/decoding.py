"""Images as RGB pixels: decoded within limits, upright, and in another size."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bifolio.errors import MissingDependencyError, RequestError
from bifolio.model.vision.resampling import resized_pixels

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MAX_BYTES = 32 << 20  # of an encoded image
MAX_PIXELS = 64 << 20
MAX_EDGE = 1 << 16
Pixels = NDArray[np.uint8]  # u8[height, width, 3]


def pillow() -> Any:
    """The module `PIL.Image`."""
    try:
        import PIL.Image
    except ImportError as error:
        raise MissingDependencyError("images need Pillow: pip install 'bifolio[vision]'") from error
    return PIL.Image


def decoded(data: bytes) -> Any:
    """The `PIL.Image` in the bytes of a file; its header is checked before any pixel is decoded."""
    module = pillow()
    if len(data) > MAX_BYTES:
        raise RequestError(f"the image has {len(data)} bytes and {MAX_BYTES} are allowed: send a smaller one")
    try:
        image = module.open(io.BytesIO(data), formats=FORMATS)
    except module.DecompressionBombError as error:
        raise RequestError(f"the image is too large: send at most {MAX_PIXELS} pixels") from error
    except (OSError, ValueError, SyntaxError) as error:
        raise RequestError(f"the image is none of {', '.join(FORMATS)}: send one of these formats") from error
    check_size(image)
    try:
        image.load()
    except (OSError, ValueError, SyntaxError, EOFError, MemoryError, module.DecompressionBombError) as error:
        raise RequestError(f"the image is damaged: {str(error)[:200]}") from error
    return image


def check_size(image: Any) -> None:
    """Refuse an image with too many pixels."""
    width, height = image.size
    check_edges(height, width)


def check_edges(height: int, width: int) -> None:
    """Refuse a size of too many pixels."""
    if not width or not height:
        raise RequestError("the image has no pixels: send one with a width and a height")
    if width * height > MAX_PIXELS or max(width, height) > MAX_EDGE:
        raise RequestError(
            f"the image has {width} x {height} pixels: send at most {MAX_PIXELS}, with edges of at most {MAX_EDGE}"
        )


def as_rgb(image: Any) -> Any:
    """An upright `PIL.Image` in RGB: the first frame, on white where it is transparent, 16 bits as 8."""
    from PIL import ImageOps

    module = pillow()
    if not isinstance(image, module.Image):
        if not isinstance(image, np.ndarray):
            raise RequestError(f"an image is a PIL.Image or an array of bytes [height, width, 3], not {image!r:.80}")
        image = _from_array(image)
    check_size(image)
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I") or image.mode == "F":
        values = np.asarray(image, np.float64)
        image = module.fromarray(np.clip(values / 256 if values.max() > 255 else values, 0, 255).astype(np.uint8))
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        white = module.new("RGBA", image.size, (255, 255, 255, 255))
        image = module.alpha_composite(white, image)
    return image.convert("RGB")


def _from_array(values: np.ndarray) -> Any:
    if values.dtype != np.uint8 or values.ndim != 3 or values.shape[2] not in (3, 4):
        raise RequestError(
            f"an image is a PIL.Image or an array u8[height, width, 3], not {values.dtype}{list(values.shape)}"
        )
    return pillow().fromarray(values)


def pixels_of(image: Any) -> Pixels:
    """The pixels of a `PIL.Image`, or of an array, as RGB."""
    if isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.ndim == 3 and image.shape[2] == 3:
        check_edges(*image.shape[:2])
        return np.array(image, order="C")  # the caller may write to its own
    return np.asarray(as_rgb(image))


def resized(pixels: Pixels, height: int, width: int, resample: int) -> Pixels:
    """u8[height, width, 3], by Pillow's filter."""
    found = resized_pixels(pixels, height, width, resample)
    if found is None:
        found = np.asarray(pillow().fromarray(pixels).resize((width, height), resample=resample))
    return found
