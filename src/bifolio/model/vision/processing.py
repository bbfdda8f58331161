"""The fields of a model's image processor."""

from __future__ import annotations

import math
from typing import Any

from bifolio.model.huggingface.json_object import JsonObject
from bifolio.model.vision.resampling import BICUBIC
from bifolio.model.vision.tower import Normalisation

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


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
