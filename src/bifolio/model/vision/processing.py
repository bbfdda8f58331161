"""Images as models take them: decoded within limits, as RGB, in the sizes and with the filters of their processors."""

from __future__ import annotations

import io
import math
from typing import Any

import numpy as np

from bifolio.errors import MissingDependencyError, RequestError
from bifolio.model.huggingface.json_object import JsonObject
from bifolio.model.vision.tower import Normalisation, Pixels

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MAX_BYTES = 32 << 20  # of an encoded image
MAX_PIXELS = 64 << 20
MAX_EDGE = 1 << 16
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
BILINEAR, BICUBIC, LANCZOS = 2, 3, 1  # filters, as Pillow numbers them


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


def resized(image: Any, height: int, width: int, resample: int) -> Pixels:
    """u8[height, width, 3] of an RGB image, by Pillow's filter."""
    return np.asarray(image.resize((width, height), resample=resample))


class Processor:
    """The fields of `preprocessor_config.json`, with the defaults of a family's processor."""

    def __init__(self, json: JsonObject, **defaults: Any) -> None:
        self.json = json.with_defaults(defaults)

    @property
    def resample(self) -> int:
        found = self.json.count("resample", BICUBIC, least=0, most=5)
        if found == 4:
            raise self.json.wrong("resample", "0, 1, 2, 3 or 5")
        return found

    def size(self, field: str = "size") -> JsonObject:
        return self.json.object(field)

    def normalisation(self) -> Normalisation:
        """The floats of a pixel's bytes."""
        json = self.json
        factor = json.number("rescale_factor", 1 / 255) if json.flag("do_rescale", True) else 1.0
        if not json.flag("do_normalize", True):
            return Normalisation(factor, (0.0,) * 3, (1.0,) * 3)
        mean, std = (json.numbers(name, (0.5,) * 3) for name in ("image_mean", "image_std"))
        if len(mean) != 3 or len(std) != 3 or not all(map(math.isfinite, (*mean, *std))) or 0.0 in std:
            raise json.wrong("image_std", "three numbers other than 0, as image_mean has three")
        return Normalisation(factor, mean, std)
