"""The page in a real browser: type, stream, stop, and watch blocks light up and go dark again."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from serving import RunningServer, running_server

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the path: apt-get install chromium"),
]
KEY = "a-key-for-the-page"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as control:
        started = control.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def page(browser: Any, server: RunningServer) -> Iterator[Any]:
    """Anything on the console, and any request to elsewhere, is a failure."""
    with open_page(browser, server) as opened:
        yield opened


class open_page:  # noqa: N801
    def __init__(self, browser: Any, server: RunningServer, **options: Any) -> None:
        self._page = browser.new_page(**{"viewport": {"width": 1280, "height": 800}, **options})
        self._server = server
        self._wrong: list[str] = []
        self._page.on("console", lambda message: self._wrong.append(message.text) if message.type == "error" else None)
        self._page.on("pageerror", lambda error: self._wrong.append(str(error)))
        self._page.on("request", lambda request: self._note(request.url))

    def _note(self, url: str) -> None:
        if not url.startswith(self._server.url):
            self._wrong.append(f"a request to {url}")

    def __enter__(self) -> Any:
        self._page.goto(self._server.url)
        self._page.wait_for_selector("#status.ok")
        return self._page

    def __exit__(self, *_: object) -> None:
        self._page.close()
        assert [text for text in self._wrong if not text.startswith("Failed to load resource")] == []


def set_options(page: Any, **options: Any) -> None:
    if page.locator("#options").get_attribute("open") is None:
        page.click("#options summary")
    for name, value in options.items():
        if isinstance(value, bool):
            page.set_checked(f"#o-{name}", value)
        elif name == "kind":
            page.select_option("#o-kind", value)
        else:
            page.fill(f"#o-{name}", str(value))


def test_a_prompt_streams_and_tokens_tell_their_chances(page: Any) -> None:
    set_options(page, max_tokens=30, seed=1, ignore_eos=True)
    page.fill("#prompt", "The fox")
    page.click("#run")
    page.wait_for_selector("#run:enabled")
    assert page.locator(".token").count() >= 10  # bytes of one character are one span
    assert "30 tokens" in page.inner_text("#speed")
    page.locator(".token:visible").nth(2).hover()
    assert "%" in page.inner_text("#tip")
    assert page.inner_text("#tip").count("◂") >= 1
    assert page.inner_text("#output").startswith("The fox")


def test_the_stop_button_ends_the_request(page: Any, server: RunningServer) -> None:
    set_options(page, max_tokens=480, n=4, ignore_eos=True)
    page.click("#run")
    page.wait_for_selector(".token", state="attached")  # a line break has no size
    page.click("#stop")
    page.wait_for_selector("#run:enabled")
    assert "stopped" in page.inner_text("#speed")
    assert server.wait_idle()["num_used_blocks"] == 0


def test_a_chat(page: Any) -> None:
    page.click("#mode-chat")
    set_options(page, max_tokens=8, ignore_eos=True, structure="yes\nno", kind="choice")
    for number in (1, 2):
        page.fill("#prompt", f"Question {number}?")
        page.click("#run")
        page.wait_for_selector("#run:enabled")
        assert page.locator(".message.user").count() == number
        assert page.locator(".message.assistant").nth(number - 1).inner_text() in ("yes", "no")
    page.click("#clear")
    assert page.locator(".message").count() == 0


def test_beams_are_a_tree(page: Any) -> None:
    set_options(page, max_tokens=6, beam_width=4)
    page.click("#run")
    page.wait_for_selector("#beams .tree")
    assert page.locator("#beams .score").count() == 4
    assert page.locator("#beams .best").count() >= 2


def test_a_mistake_is_said(page: Any) -> None:
    set_options(page, temperature="hot")
    page.click("#run")
    assert "temperature" in page.inner_text("#problem")
    set_options(page, temperature="1")
    page.fill("#prompt", "")
    page.click("#run")
    page.wait_for_selector("#run:enabled")
    assert page.inner_text("#problem")


@pytest.mark.parametrize("viewport", [{"width": 1280, "height": 800}, {"width": 390, "height": 844}])
def test_blocks_light_up_and_go_back(browser: Any, server: RunningServer, viewport: dict[str, int]) -> None:
    with open_page(browser, server, viewport=viewport) as page:
        page.click("#tab-live")
        page.wait_for_selector("#blocks[data-held='0']")
        client = server.client()
        options: dict[str, Any] = {"max_tokens": 300, "n": 3, "extra_body": {"ignore_eos": True}}
        prompt = [7 + number % 80 for number in range(60)]
        thread = threading.Thread(target=lambda: client.completions.create(model="tiny", prompt=prompt, **options))
        thread.start()
        page.wait_for_selector("#blocks:not([data-held='0'])")
        page.wait_for_selector(".slot >> nth=2")
        assert page.locator(".slot").count() == 3
        assert page.locator(".slot").first.inner_text().startswith(("prefill", "decode"))
        page.hover("#blocks", position={"x": 5, "y": 5})
        assert "block 1" in page.inner_text("#tip")
        thread.join()
        page.wait_for_selector("#blocks[data-held='0']")
        assert page.locator(".slot").count() == 0
        assert int(page.get_attribute("#blocks", "data-cached")) > 0
        wide = page.evaluate("() => document.documentElement.scrollWidth")
        assert wide <= viewport["width"]


def test_a_server_with_keys_asks_for_one(browser: Any) -> None:
    with running_server(keys=[KEY]) as server, open_page(browser, server) as page:
        page.wait_for_selector("#key-form:not([hidden])")
        page.fill("#key", KEY)
        page.click("#key-form button")
        page.wait_for_selector("#key-form", state="hidden")
        set_options(page, max_tokens=5, ignore_eos=True)
        page.click("#run")
        page.wait_for_selector(".token", state="attached")  # a line break has no size
        page.click("#tab-live")
        page.wait_for_selector("#blocks[data-held]")
        assert page.locator("#key-form").is_hidden()
