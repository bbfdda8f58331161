"""The tokens and images of prompts, in every form that callers of `LLM` pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from bifolio.api.prompts import Prompt, suffix_of
from bifolio.errors import RequestError
from bifolio.images import TEXT_ONLY
from bifolio.model.loaded import TextModel
from bifolio.model.vision.decoding import decoded
from bifolio.model.vision.pictures import Pictures
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


def pictures_of(pictures: Pictures | None, batch: Sequence[Any]) -> list[list[Picture]]:
    """The pictures of each prompt; `pictures`: of the model, None if it reads text only."""
    images = [given_images(prompt) if isinstance(prompt, Mapping) else [] for prompt in batch]
    if not any(images):
        return [[] for _ in batch]
    found = iter(required_pictures(pictures).read_all([image for own in images for image in own]))
    return [list(islice(found, len(own))) for own in images]


def required_pictures(pictures: Pictures | None) -> Pictures:
    """The pictures of a model; an error if it takes no images."""
    if pictures is None:
        raise RequestError(TEXT_ONLY)
    return pictures


def with_images(
    model: TextModel, text: str | None, token_ids: Sequence[int] | None, pictures: list[Picture]
) -> PromptTokens:
    """A prompt of text, or of token ids, with pictures in place of its placeholders."""
    vision, tokenizer = required_vision(model), model.require_tokenizer()
    if token_ids is None:
        ((whole, _),) = expanded([(text or "", False)], vision, pictures)
        ids = tokenizer.encode(whole)
    else:
        place = tokenizer.token_id(vision.placeholder)
        texts = tokenizer.encode_batch([picture.text for picture in pictures], add_special_tokens=False)
        ids = expanded_ids(token_ids, -1 if place is None else place, vision, texts)
    return PromptTokens(text, ids, placed(ids, vision, pictures))


def tokens_of(model: TextModel, prompt: Prompt, pictures: list[Picture]) -> PromptTokens:
    """The text, token ids and images of a prompt in any of its forms."""
    if isinstance(prompt, PromptTokens):
        return prompt
    text: str | None = None
    suffix = suffix_of(prompt)
    token_ids: Any = prompt
    if isinstance(prompt, Mapping):
        text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if pictures:
            if suffix is not None:
                raise RequestError("a prompt has either a suffix or images: leave one of them out")
            return with_images(model, text, token_ids, pictures)
        token_ids = text if token_ids is None else token_ids
    if suffix is not None and token_ids is not None:
        return PromptTokens(text, model.require_infill().prompt(model.require_tokenizer(), token_ids, suffix))
    if isinstance(token_ids, str):
        text, token_ids = token_ids, model.require_tokenizer().encode(token_ids)
    if token_ids is None or isinstance(token_ids, Mapping):
        raise RequestError("a prompt is text, a list of token ids, or {'prompt_token_ids': [...]}")
    return PromptTokens(text, token_ids)


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
    """The messages as templates read them, and their images in order: bytes of files where they are data URLs."""
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
    return data_of(image) if isinstance(image, str) else image
