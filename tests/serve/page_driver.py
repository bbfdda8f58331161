"""The page in a real Chromium: a browser, pages whose errors are failures, and the gestures that tests repeat."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from serving import RunningServer

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_chromium = [
    pytest.mark.full,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the path: apt-get install chromium"),
]
DESKTOP = {"width": 1440, "height": 900}
PHONE = {"width": 390, "height": 844}
NO_INTERNET = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
LAYOUT = """() => ({width: innerWidth, body: document.body.className,
  rules: [...document.styleSheets].map(sheet => sheet.cssRules.length)})"""
BROKEN_BY_TEST = ("Failed to load resource", "net::ERR")  # console lines of requests that a test lets fail


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """A browser that reaches this machine alone."""
    with playwright.sync_playwright() as control:
        browser = control.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", NO_INTERNET])
        yield browser
        browser.close()


@contextlib.contextmanager
def open_page(browser: Any, server: RunningServer, **options: Any) -> Iterator[Any]:
    """A page of its own storage. Any error on the console and any request to another host is a failure."""
    page = browser.new_page(**{"viewport": DESKTOP, **options})
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))

    def is_own(url: str) -> bool:
        return url.removeprefix("blob:").startswith(server.url)  # blob: made by the page itself

    page.on("request", lambda request: None if is_own(request.url) else wrong.append(request.url))
    page.on("dialog", lambda dialog: dialog.accept())
    page.goto(server.url)
    page.wait_for_selector("#status.ok")
    page.wait_for_function("width => innerWidth === width", arg=page.viewport_size["width"])
    try:
        yield page
    finally:
        with contextlib.suppress(playwright.Error):  # the page may be gone
            print("layout at the end:", page.evaluate(LAYOUT))  # shown with a failure: texts depend on it
        page.close()
    assert [text for text in wrong if not text.startswith(BROKEN_BY_TEST)] == []


def set_options(page: Any, **options: Any) -> None:
    """Values of the options panel, by the API's names; "" empties a field."""
    opened = not page.is_visible("#panel")
    if opened:
        page.click("#show-panel")
    for name, value in options.items():
        page.evaluate(f"document.getElementById('o-{name}').closest('details').open = true")
        if isinstance(value, bool):
            page.set_checked(f"#o-{name}", value)
        elif name == "kind":
            page.select_option("#o-kind", value)
        else:
            page.fill(f"#o-{name}", str(value))
    if opened and page.is_visible("#close-panel"):
        page.click("#close-panel")


def show_panel(page: Any) -> None:
    if not page.is_visible("#panel"):
        page.click("#show-panel")


def always_answer(page: Any, *texts: str) -> None:
    """Constrain the model to these texts."""
    set_options(page, kind="choice", structure="\n".join(texts), max_tokens="64")


def wait_until_done(page: Any) -> None:
    page.wait_for_selector("#run:not([hidden])")
    page.wait_for_selector(".message.assistant[aria-busy=false]")


def send(page: Any, text: str) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")
    wait_until_done(page)


def answers(page: Any) -> list[str]:
    return [text.strip() for text in page.locator(".message.assistant .text").all_inner_texts()]


def axe_findings(page: Any) -> list[str]:
    """Findings of axe-core, minor ones included: rule, and the elements that break it."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    violations = axe.run(page).response["violations"]
    return [
        f"{rule['id']}: {node['html'][:120]} {node['failureSummary'][:200]}"
        for rule in violations
        for node in rule["nodes"]
    ]
