"""Images on the page in a real browser: picked, pasted and dropped, shown in the thread, sent again, and kept."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

import pytest
from page_driver import always_answer, answers, axe_findings, chromium, needs_chromium, open_page, send, wait_until_done
from serving import RunningServer, running_server

from vision.vision_models import gemma3_model, picture

pytestmark = needs_chromium
MAX_BODY = 300_000
GIVE = """([selector, kind, data, type, name]) => {
  const bytes = Uint8Array.from(atob(data), (character) => character.charCodeAt(0));
  const files = new DataTransfer();
  files.items.add(new File([bytes], name, { type }));
  const options = { bubbles: true, cancelable: true };
  const event = kind === "paste" ? new ClipboardEvent("paste", { ...options, clipboardData: files })
                                 : new DragEvent(kind, { ...options, dataTransfer: files });
  return !document.querySelector(selector).dispatchEvent(event);
}"""


@pytest.fixture(scope="module")
def seeing() -> Iterator[RunningServer]:
    from bifolio.serve.http.context import Limits

    engine = {"model": str(gemma3_model().folder), "kernels": "native", "max_model_len": 512, "num_blocks": 300}
    with running_server(engine=engine, limits=Limits(max_body_bytes=MAX_BODY)) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


@pytest.fixture
def page(browser: Any, seeing: RunningServer) -> Iterator[Any]:
    with open_page(browser, seeing) as opened:
        yield opened


def file_of(size: int = 40, seed: int = 0, kind: str = "PNG") -> bytes:
    data = io.BytesIO()
    picture(size, size, seed).save(data, kind)
    return data.getvalue()


def pick(page: Any, *files: tuple[str, str, bytes]) -> None:
    page.set_input_files("#image-file", [{"name": n, "mimeType": t, "buffer": data} for n, t, data in files])


def give(page: Any, selector: str, kind: str, data: bytes, mime: str = "image/png", name: str = "a.png") -> bool:
    """Whether the page took the event."""
    return bool(page.evaluate(GIVE, [selector, kind, base64.b64encode(data).decode(), mime, name]))


def sent_images(page: Any) -> list[list[str]]:
    """Collect the URLs of images of every chat request from now on."""
    found: list[list[str]] = []

    def look(request: Any) -> None:
        if request.url.endswith("/v1/chat/completions"):
            parts = [m["content"] for m in request.post_data_json["messages"] if isinstance(m["content"], list)]
            found.append([part["image_url"]["url"] for each in parts for part in each if part["type"] == "image_url"])

    page.on("request", look)
    return found


def url_of(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def test_images_are_picked_pasted_and_dropped(page: Any) -> None:
    """All three go with the message, in order; a further turn and an edited message send them again."""
    files = [file_of(seed=number) for number in range(2)]
    jpeg = file_of(seed=2, kind="JPEG")
    requests = sent_images(page)
    always_answer(page, "seen")
    pick(page, ("one.png", "image/png", files[0]))
    page.wait_for_selector("#attachments img >> nth=0")
    assert give(page, "#prompt", "paste", files[1])
    page.wait_for_selector("#attachments img >> nth=1")
    assert give(page, "#messages", "dragover", jpeg)
    assert give(page, "#messages", "drop", jpeg, "image/jpeg", "c.jpg")
    page.wait_for_selector("#attachments img >> nth=2")
    assert axe_findings(page) == []
    send(page, "What is this?")
    assert answers(page) == ["seen"]
    expected = [url_of(files[0]), url_of(files[1]), url_of(jpeg, "jpeg")]
    assert requests == [expected]
    assert page.locator("#attachments img").count() == 0
    images = page.locator(".message.user img.thumbnail")
    assert images.count() == 3
    assert all(images.nth(number).evaluate("(image) => image.naturalWidth") == 40 for number in range(3))
    send(page, "And now?")
    page.click(".message.user >> nth=0 >> text=Edit")
    page.fill(".edit", "Another question")
    page.press(".edit", "Enter")
    page.wait_for_selector(".message.user:has-text('Another question')")
    wait_until_done(page)
    assert requests == [expected] * 3


def test_images_stay_when_the_page_is_opened_again(page: Any) -> None:
    requests, data = sent_images(page), file_of(seed=5)
    always_answer(page, "seen")
    pick(page, ("one.png", "image/png", data))
    page.wait_for_selector("#attachments img")
    send(page, "Look")
    page.reload()
    page.wait_for_selector("#status.ok")
    page.wait_for_selector(".message.user img.thumbnail")
    send(page, "Again")
    assert requests == [[url_of(data)]] * 2


def test_wrong_and_large_images_are_told_before_they_are_sent(page: Any) -> None:
    requests = sent_images(page)
    pick(page, ("text.png", "text/plain", b"hello"))
    page.wait_for_selector("#problem:has-text('text.png is no PNG, JPEG, WebP or GIF')")
    large = file_of(size=400)
    assert len(large) > 0.75 * MAX_BODY
    pick(page, ("large.png", "image/png", large))
    page.wait_for_selector("#problem:has-text('large.png has 0.5 MB and the server takes 0.2 MB')")
    assert page.locator("#attachments img").count() == 0
    assert "at most 0.2 MB together" in page.get_attribute("#attach", "title")
    middle = file_of(size=190)
    for number in range(2):
        pick(page, (f"{number}.png", "image/png", middle))
        page.wait_for_selector(f"#attachments img >> nth={number}")
    page.fill("#prompt", "Both")
    page.press("#prompt", "Enter")
    page.wait_for_selector("#problem:has-text('The images of this chat have 0.2 MB and the server takes 0.2 MB')")
    assert page.input_value("#prompt") == "Both"
    page.click("#attachments >> text=Remove >> nth=0")
    assert page.locator("#attachments img").count() == 1
    assert requests == []


def test_a_text_model_offers_no_images(browser: Any, server: RunningServer) -> None:
    with open_page(browser, server) as page:
        assert not page.is_visible("#attach")
        assert give(page, "#messages", "drop", file_of())
        page.wait_for_selector("#problem:has-text('This model reads text only.')")
        assert page.locator("#attachments img").count() == 0
