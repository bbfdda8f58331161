"""The live view, drafts and beams as they happen, a server that is lost, colours, narrow screens, and accessibility."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from page_driver import (
    DESKTOP,
    PHONE,
    always_answer,
    answers,
    axe_findings,
    chromium,
    needs_chromium,
    open_page,
    send,
    set_options,
    wait_until_done,
)
from serving import RunningServer, running_server

pytestmark = needs_chromium
WIDE = "() => document.documentElement.scrollWidth"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_blocks_light_up_and_go_back(browser: Any, server: RunningServer, viewport: dict[str, int]) -> None:
    with open_page(browser, server, viewport=viewport) as page:
        page.click("#tab-live")
        page.wait_for_selector("#blocks[data-held='0']")
        assert page.inner_text("#waiting") == "no requests waiting"
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
        assert page.evaluate(WIDE) <= viewport["width"]
        page.wait_for_selector("#now-ttft:text-is('–')")  # no news for a while


def test_drafts_are_coloured_as_they_are_verified(browser: Any) -> None:
    speculative = {"method": "ngram", "length": 4, "adaptive": False}
    with running_server(engine={"speculative": speculative}) as server, open_page(browser, server) as page:
        page.click("#new-text")
        page.check("#view-drafts")
        set_options(page, temperature=0, max_tokens=60, ignore_eos=True)
        page.fill("#prompt", "ab ab ab ab ab ab ab ab")
        page.press("#prompt", "Enter")
        page.wait_for_selector(".message .token.accepted, .message .rejected")
        wait_until_done(page)
        assert page.locator(".message .token.accepted").count() > 0
        stats = page.inner_text(".stats")
        assert "draft tokens accepted" in stats
        whole = page.evaluate("document.querySelector('.message.assistant .text').cloneNode(true).textContent")
        wrong = "".join(page.locator(".message .rejected").all_text_contents())
        page.check("#view-text")
        text = page.text_content(".message.assistant .text")
        assert len(whole) == len(text) + len(wrong)
        page.click("#tab-live")
        page.wait_for_selector("#drafts-chart:not([hidden])")


def test_beams_grow_as_a_tree(browser: Any, server: RunningServer) -> None:
    with open_page(browser, server) as page:
        page.click("#new-text")
        set_options(page, max_tokens=80, beam_width=4)
        page.evaluate(
            """() => {
              window.seen = [];
              new MutationObserver(() => {
                const count = (name) => document.querySelectorAll(`.segment.${name}`).length;
                window.seen.push([count('running'), count('dropped'), count('best')]);
              }).observe(document.querySelector('#messages'), {childList: true, subtree: true});
            }"""
        )
        send(page, "Once")
        seen = page.evaluate("window.seen")
        assert any(running and not best for running, _, best in seen)  # while the search runs
        assert any(dropped for _, dropped, _ in seen)
        assert page.locator(".segment.best").count() > 0
        assert page.locator(".segment.running").count() == 0
        best = "".join(page.locator(".segment.best .words").all_text_contents()).removeprefix("prompt")
        text = page.text_content(".message.assistant .text")
        assert best.replace("\ufffd", "") == text.replace("\ufffd", "")  # characters are cut where beams part


def test_a_lost_server_is_said_and_found_again(browser: Any) -> None:
    first = running_server()
    with first as server, open_page(browser, server) as page:
        always_answer(page, "before")
        send(page, "Hello")
        page.click("#tab-live")
        page.wait_for_selector("#blocks[data-held]")
        server.stop()
        page.wait_for_selector("#lost:not([hidden])")
        assert "The server does not answer." in page.inner_text("#lost")
        assert page.inner_text("#status") == "not reachable"
        page.wait_for_selector("#blocks:not([data-held])", state="attached")
        assert page.inner_text("#blocks-summary") == "No figures: the server does not answer."
        assert page.inner_text("#now-decode") == "–"
        page.click("#tab-play")
        assert page.inner_text("#used") == ""
        page.fill("#prompt", "Still there?")
        page.press("#prompt", "Enter")
        wait_until_done(page)
        assert "the connection to the server was lost" in page.locator(".stats").last.inner_text()
        with running_server(port=server.port):
            page.wait_for_selector("#status.ok")
            assert page.is_hidden("#lost")
            page.click(".message.assistant >> nth=1 >> text=Regenerate")
            wait_until_done(page)
            assert answers(page) == ["before", "before"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_follow_the_system_and_the_button(browser: Any, server: RunningServer, scheme: str) -> None:
    background = "() => getComputedStyle(document.body).backgroundColor"
    with open_page(browser, server, color_scheme=scheme) as page:
        automatic = page.evaluate(background)
        seen = {}
        for name in ("light", "dark"):
            page.click("#theme")
            assert page.inner_text("#theme") == f"Theme: {name}"
            seen[name] = page.evaluate(background)
        assert seen["light"] != seen["dark"]
        assert automatic == seen[scheme]
        page.reload()
        assert page.evaluate(background) == seen["dark"]


def test_a_phone_has_drawers(browser: Any, server: RunningServer) -> None:
    with open_page(browser, server, viewport=PHONE) as page:
        assert page.is_hidden("#sidebar")
        assert page.is_hidden("#panel")
        always_answer(page, "a rather long answer " * 2)
        send(page, "Is it narrow?")
        assert page.evaluate(WIDE) <= PHONE["width"]
        page.click("#show-sidebar")
        assert page.is_visible("#sidebar")
        page.keyboard.press("Escape")
        assert page.is_hidden("#sidebar")
        box = page.locator("#run").bounding_box()
        assert box["x"] + box["width"] <= PHONE["width"]
        assert box["y"] + box["height"] <= PHONE["height"]


def test_answers_are_announced_to_screen_readers(browser: Any, server: RunningServer) -> None:
    with open_page(browser, server) as page:
        always_answer(page, "read me out")
        send(page, "Hello")
        page.wait_for_selector("#announce:has-text('Answer: read me out')", state="attached")
        assert page.get_attribute("#announce", "aria-live") == "polite"


def test_work_is_done_once_a_frame(browser: Any, server: RunningServer) -> None:
    with open_page(browser, server) as page:
        count = page.evaluate(
            """async () => {
              const { onFrame } = await import('/page/core.js');
              let count = 0;
              for (let i = 0; i < 100; i += 1) onFrame('answer', () => { count += 1; });
              const early = count;
              await new Promise((done) => setTimeout(done, 300));
              return [early, count];
            }"""
        )
        assert count == [0, 1]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_axe_finds_nothing(browser: Any, server: RunningServer, viewport: dict[str, int], scheme: str) -> None:
    with open_page(browser, server, viewport=viewport, color_scheme=scheme) as page:
        found = axe_findings(page)
        always_answer(page, "**bold**, `code` and [a link](https://example.org)")
        send(page, "Hello")
        page.click("text=Regenerate")
        wait_until_done(page)
        found += axe_findings(page)
        page.check("#view-chances")
        set_options(page, beam_width=2, kind="", max_tokens=8)
        send(page, "Beams")
        found += axe_findings(page)
        page.click("#tab-live")
        page.wait_for_selector("#blocks[data-held]")
        found += axe_findings(page)
    assert found == []
