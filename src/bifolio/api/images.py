"""Images among the arguments of `LLM`: `multi_modal_data` of prompts, and the parts of messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bifolio.errors import RequestError
from bifolio.images import TEXT_ONLY
from bifolio.model.loaded import TextModel
from bifolio.model.vision.processing import decoded
from bifolio.model.vision.prompt import expanded, expanded_ids, placed
from bifolio.model.vision.tower import Picture, Vision
from bifolio.prompts import PromptTokens
from bifolio.text.chat_template import Message
from bifolio.text.data_urls import data_of
from bifolio.text.roles import Parts

IMAGE_KEYS = ("image", "image_pil", "image_url")  # of a part of a message


def given_images(prompt: Mapping[str, Any]) -> list[Any]:
    """The images of a prompt's `multi_modal_data`."""
    data = prompt.get("multi_modal_data")
    if data is None:
        return []
    if not isinstance(data, Mapping):
        raise RequestError("multi_modal_data is a mapping: pass {'image': image} or {'image': [image, ...]}")
    for kind in data:
        if kind != "image":
            raise RequestError(f"multi_modal_data has {kind!r}: models here read images only, pass {{'image': ...}}")
    images = data.get("image")
    if images is None:
        return []
    return list(images) if isinstance(images, list | tuple) else [images]


def required_vision(model: TextModel) -> Vision:
    """How the model takes images; an error if it takes none."""
    if model.vision is None:
        raise RequestError(TEXT_ONLY)
    return model.vision


def with_images(model: TextModel, text: str | None, token_ids: Sequence[int] | None, images: list[Any]) -> PromptTokens:
    """A prompt of text, or of token ids, with images in place of its placeholders."""
    vision, tokenizer = required_vision(model), model.require_tokenizer()
    pictures = [vision.read(image) for image in images]
    if token_ids is None:
        ((whole, _),) = expanded([(text or "", False)], vision, pictures)
        ids = tokenizer.encode(whole)
    else:
        place = tokenizer.token_id(vision.placeholder)
        texts = tokenizer.encode_batch([picture.text for picture in pictures], add_special_tokens=False)
        ids = expanded_ids(token_ids, -1 if place is None else place, vision, texts)
    return PromptTokens(text, ids, placed(ids, vision, pictures))


def parts_with_images(model: TextModel, parts: Parts, pictures: list[Picture]) -> PromptTokens:
    """The tokens of a rendered conversation with its images."""
    vision = required_vision(model)
    ids = model.require_tokenizer().encode_parts(expanded(parts, vision, pictures))
    return PromptTokens(None, ids, placed(ids, vision, pictures))


def image_of_file(path: Path) -> Any:
    """The `PIL.Image` of a file."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror or error}") from error
    try:
        return decoded(data)
    except RequestError as error:
        raise RequestError(f"{path}: {error}") from error


def taken_out(messages: Sequence[Message]) -> tuple[list[Message], list[Any]]:
    """The messages as templates read them, and their images in order."""
    found: list[Message] = []
    images: list[Any] = []
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list):
            found.append(message)
            continue
        parts = []
        for part in content:
            image = _image_of(part)
            images += [] if image is None else [image]
            parts.append(part if image is None else {"type": "image"})
        found.append({**message, "content": parts})
    return found, images


def _image_of(part: Any) -> Any | None:
    """The image of a part of a message; None for other parts."""
    if not isinstance(part, Mapping):
        return None
    image = next((part[key] for key in IMAGE_KEYS if part.get(key) is not None), None)
    if image is None:
        if str(part.get("type")).startswith(("image", "input_image")):
            raise RequestError("a part of a message names no image: pass {'type': 'image', 'image': image}")
        return None
    if isinstance(image, Mapping):
        image = image.get("url")
    return decoded(data_of(image)) if isinstance(image, str) else image
