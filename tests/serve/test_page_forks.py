"""The view of branches that the engine holds: open, fork, generate, cut and close, with the blocks that they share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from page_driver import DESKTOP, PHONE, axe_findings, chromium, needs_chromium, open_page
from serving import RunningServer

pytestmark = needs_chromium
PROMPT = "Once upon a time a little fox lived in a quiet wood and read the long books of the owl."


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


def settled(page: Any, count: int) -> tuple[int, int]:
    """(Blocks of all branches, their sum over the branches), once so many branches are shown."""
    page.wait_for_function(
        f"() => document.querySelectorAll('.fork').length === {count} && forks.getAttribute('aria-busy') === 'false'"
    )
    assert page.is_hidden("#forks-problem"), page.inner_text("#forks-problem")
    return int(page.get_attribute("#forks", "data-blocks")), int(page.get_attribute("#forks", "data-alone"))


@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_forks_share_blocks_until_their_texts_differ(
    browser: Any, server: RunningServer, viewport: dict[str, int]
) -> None:
    with open_page(browser, server, viewport=viewport) as page:
        page.click("#tab-tree")
        page.fill("#forks-prompt", PROMPT)
        page.click("#forks-form button")
        held, alone = settled(page, 1)
        assert held == alone > 2
        page.fill("#forks-n", "3")
        page.click("[aria-label='Fork: Branch 1']")
        assert settled(page, 4) == (held, 4 * held), "a fork takes no block"
        assert page.locator(".fork-blocks i.shared").count() == 4 * held
        for number in (2, 3):
            page.fill("#forks-temperature", "1.5")
            page.click(f"[aria-label='Generate: Branch {number}']")
            settled(page, 4)
        held_now, alone = settled(page, 4)
        assert held < held_now < alone, "generated tokens are in blocks of their own, the prompt is shared"
        assert page.locator(".fork-blocks i.own").count() >= 2
        texts = page.locator(".fork-text").all_inner_texts()
        assert all(text.replace("…", "")[:20] in PROMPT or PROMPT in text for text in texts)
        assert len(set(texts)) == 3
        page.fill("#forks-text", " And then")
        page.click("[aria-label='Append: Branch 4']")
        settled(page, 4)
        assert page.locator(".fork-text").nth(3).inner_text().endswith(" And then")
        page.click("[aria-label='Cut: Branch 2']")
        settled(page, 4)
        assert page.locator(".fork-text").nth(1).inner_text() == texts[0]
        assert axe_findings(page) == []
        assert page.evaluate("() => document.documentElement.scrollWidth") <= viewport["width"]
        for left in (3, 2, 1, 0):
            page.locator(".fork >> text=Close").first.click()
            settled(page, left)
        assert page.is_visible("#no-forks")


def test_tabs_by_keyboard_and_errors_in_words(browser: Any, server: RunningServer) -> None:
    with open_page(browser, server) as page:
        page.focus("#tab-play")
        for name in ("live", "tree", "play", "live", "tree"):
            page.keyboard.press("ArrowRight")
            assert page.get_attribute(f"#tab-{name}", "aria-selected") == "true"
        page.fill("#forks-prompt", "a" * 5000)
        page.click("#forks-form button")
        page.wait_for_selector("#forks-problem:not([hidden])")
        assert "tokens" in page.inner_text("#forks-problem")
        page.fill("#forks-prompt", "Once")
        page.click("#forks-form button")
        settled(page, 1)
        client = server.client()
        [branch] = page.evaluate("() => performance.getEntriesByType('resource').map((each) => each.name)"
                                 ".filter((name) => /branch_[0-9a-f]+$/.test(name)).slice(-1)")  # fmt: skip
        client.delete(branch, cast_to=object)  # by another client of the same owner
        page.click("[aria-label^=Generate]")
        page.wait_for_function("() => document.querySelectorAll('.fork').length === 0")
        assert "there is no branch" in page.inner_text("#forks-problem")
