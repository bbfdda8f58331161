"""The families of towers, by the `model_type` of config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bifolio.model.huggingface.json_object import JsonObject
from bifolio.model.vision.families import gemma3, gemma4, idefics3, pixtral, qwen3vl
from bifolio.model.vision.tower import Vision

FAMILIES: dict[str, Callable[[JsonObject, JsonObject], Vision]] = {
    kind: family.read for family in (gemma3, gemma4, idefics3, pixtral, qwen3vl) for kind in family.TYPES
}


def vision_of(config: JsonObject, processor: Mapping[str, Any], path: Any) -> Vision | None:
    """How the model of a folder takes images; None if it reads text only, or its tower is not known."""
    read = FAMILIES.get(str(config.get("model_type")))
    if read is None or not config.object("vision_config"):
        return None
    return read(config, JsonObject(processor, path))
