"""Images of requests: read from data URLs, decoded in the helper process, and placed in the prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from bifolio.errors import RequestError
from bifolio.images import TEXT_ONLY, PromptImage
from bifolio.model.vision.pictures import Pictures, file_key
from bifolio.model.vision.prompt import MAX_IMAGES, expanded, placed
from bifolio.model.vision.tower import Picture, Vision
from bifolio.serve.helpers.helper_messages import KILLED, Failed, View, Viewed
from bifolio.serve.http.auth import Tenant
from bifolio.serve.http.context import ServerContext
from bifolio.serve.http.errors import ApiError, bad_request
from bifolio.serve.http.fetched_images import fetched, is_remote
from bifolio.serve.protocols.openai_types import Message
from bifolio.text.data_urls import data_of
from bifolio.text.roles import Parts

MEDIA = "<__media__>"  # of llama.cpp


def image_urls(messages: Sequence[Message]) -> list[tuple[str, str]]:
    """(Place in the request, URL) of every image."""
    found = []
    for number, message in enumerate(messages):
        for part, content in enumerate(message.content if isinstance(message.content, list) else ()):
            place = f"messages[{number}].content[{part}]"
            if content.type == "text":
                if content.image_url is not None:
                    raise bad_request(f"{place} is a text with an image_url: give its url a part of its own", place)
                if content.text is None:
                    raise bad_request(f"{place} is a text without its text", place)
            elif content.text is not None:
                raise bad_request(f"{place} is an image_url with a text: give each a part of its own", place)
            elif content.image_url is None:
                raise bad_request(f"{place} is an image_url without its url", place)
            else:
                found.append((place, url if isinstance(url := content.image_url, str) else url.url))
    return found


async def read_pictures(context: ServerContext, urls: Sequence[tuple[str, str]], tenant: Tenant) -> list[Picture]:
    """The images as the model reads them."""
    if not urls:
        return []
    if context.pictures is None:
        raise bad_request(f"{urls[0][0]}: {TEXT_ONLY}", urls[0][0])
    if len(urls) > MAX_IMAGES:
        raise bad_request(f"the request has {len(urls)} images and {MAX_IMAGES} are allowed: send fewer", "messages")
    return [await _picture(context, context.pictures, place, url, tenant) for place, url in urls]


async def _picture(context: ServerContext, pictures: Pictures, place: str, url: str, tenant: Tenant) -> Picture:
    try:
        if context.limits.image_hosts and is_remote(url):
            data = await fetched(url, context.limits.image_hosts)
        else:
            data = await asyncio.to_thread(data_of, url)
    except RequestError as error:
        raise bad_request(f"{place}: {error}", place, "invalid_image") from error
    key = await asyncio.to_thread(file_key, data, tenant.share)
    known = pictures.known(key)
    if known is not None:
        return known
    outcome = await context.templates.ask(View(data), tenant.share)
    if isinstance(outcome, Viewed):
        tiles = (np.frombuffer(data, np.uint8).reshape(height, width, 3) for height, width, data in outcome.tiles)
        return await asyncio.to_thread(pictures.put, key, Picture(outcome.text, tuple(tiles)))
    slow = isinstance(outcome, Failed) and outcome.kind == KILLED
    said = outcome.message if isinstance(outcome, Failed) and not slow else ""
    message = said or "the image takes too much time or memory: send a smaller one"
    raise bad_request(f"{place}: {message}", place, "invalid_image")


async def media_prompt(
    context: ServerContext, text: str, data: Sequence[tuple[str, str]], tenant: Tenant
) -> tuple[list[int], tuple[PromptImage, ...]]:
    """The tokens and images of a text with `MEDIA` in the place of each image. data: (place, base64)."""
    urls = [(place, f"data:image/png;base64,{each}") for place, each in data]
    pictures = await read_pictures(context, urls, tenant)
    if text.count(MEDIA) != len(pictures) and pictures:
        raise bad_request(
            f"the prompt has {text.count(MEDIA)} places for images and {len(pictures)} were passed: write {MEDIA!r} "
            "once for each image",
            "prompt",
        )
    if pictures:
        text = text.replace(MEDIA, _vision(context).placeholder)
    whole = "".join(part for part, _ in with_texts(context, [(text, False)], pictures))
    (ids,) = await context.tokenizers.encode([whole], True, context.max_model_len)
    return ids, with_places(context, ids, pictures)


def with_texts(context: ServerContext, parts: Parts, pictures: Sequence[Picture]) -> Parts:
    """The parts of a prompt with the text of each picture in its place."""
    if not pictures:
        return parts
    try:
        return expanded(parts, _vision(context), pictures)
    except RequestError as error:
        raise bad_request(str(error), "messages") from error


def with_places(
    context: ServerContext, token_ids: Sequence[int], pictures: Sequence[Picture]
) -> tuple[PromptImage, ...]:
    """The images of a prompt, with the tokens that their rows replace."""
    if not pictures:
        return ()
    try:
        return placed(token_ids, _vision(context), pictures)
    except RequestError as error:
        raise bad_request(str(error), "messages") from error


def _vision(context: ServerContext) -> Vision:
    if context.model.vision is None:
        raise ApiError(400, TEXT_ONLY, "invalid_image")
    return context.model.vision
