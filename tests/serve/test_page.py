"""The playground in a real browser: messages, answers, branches, options and conversations that stay."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from page_driver import (
    always_answer,
    answers,
    chromium,
    needs_chromium,
    open_page,
    send,
    set_options,
    show_panel,
    wait_until_done,
)
from serving import RunningServer, running_server

pytestmark = needs_chromium
KEY = "a-key-for-the-page"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


@pytest.fixture
def page(browser: Any, server: RunningServer) -> Iterator[Any]:
    with open_page(browser, server) as opened:
        yield opened


def test_enter_sends_and_shift_enter_breaks_the_line(page: Any) -> None:
    always_answer(page, "yes")
    page.click("#prompt")
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    assert page.input_value("#prompt") == "one\ntwo"
    assert page.locator(".message").count() == 0
    page.keyboard.press("Enter")
    wait_until_done(page)
    assert page.locator(".message.user .text").inner_text() == "one\ntwo"
    assert page.input_value("#prompt") == ""
    assert page.evaluate("document.activeElement.id") == "prompt"


def test_each_answer_appears_once(page: Any) -> None:
    always_answer(page, "perfectly unique")
    send(page, "Say it")
    assert page.inner_text("#messages").count("perfectly unique") == 1
    assert answers(page) == ["perfectly unique"]


def test_the_end_of_text_is_not_shown(page: Any) -> None:
    page.check("#view-chances")
    always_answer(page, "yes")
    send(page, "Well?")
    assert "stop" not in page.inner_text(".stats")
    assert answers(page) == ["yes"]  # the last token ends the text and has no span
    assert page.locator(".token").first.inner_text() in "yes"


def test_tokens_tell_their_chances(page: Any) -> None:
    page.click("#new-text")
    page.check("#view-chances")
    set_options(page, max_tokens=30, seed=1, ignore_eos=True)
    send(page, "The fox")
    assert page.locator(".token").count() >= 10  # bytes of one character are one span
    assert "30 tokens" in page.inner_text(".stats")
    page.locator(".token:visible").nth(2).hover()
    assert "%" in page.inner_text("#tip")
    assert page.inner_text("#tip").count("◂") >= 1


def test_escape_stops(page: Any, server: RunningServer) -> None:
    set_options(page, max_tokens=400, n=4, ignore_eos=True)
    page.fill("#prompt", "Go on")
    page.press("#prompt", "Enter")
    page.wait_for_selector(".stats:has-text('token')")
    page.keyboard.press("Escape")
    wait_until_done(page)
    assert "stopped" in page.locator(".stats").first.inner_text()
    assert server.wait_idle()["num_used_blocks"] == 0


def test_the_stop_button_ends_the_request(page: Any, server: RunningServer) -> None:
    set_options(page, max_tokens=400, ignore_eos=True)
    page.fill("#prompt", "Go on")
    page.click("#run")
    page.wait_for_selector(".stats:has-text('token')")
    page.click("#stop")
    wait_until_done(page)
    assert "stopped" in page.inner_text(".stats")
    assert server.wait_idle()["num_used_blocks"] == 0


def test_regenerate_edit_and_branch_make_a_tree(page: Any) -> None:
    always_answer(page, "first")
    send(page, "Question")
    always_answer(page, "second")
    page.click(".message.assistant >> text=Regenerate")
    wait_until_done(page)
    assert answers(page) == ["second"]
    send(page, "And then")
    page.click(".message.user >> nth=0 >> text=Edit")
    page.fill(".edit", "Another question")
    page.press(".edit", "Enter")
    page.wait_for_selector(".message.user:has-text('Another question')")
    wait_until_done(page)
    show_panel(page)
    assert page.locator("#branches [role=treeitem] > .branch > span").all_text_contents() == [
        "Question", "first", "second", "And then", "second", "Another question", "second",
    ]  # fmt: skip
    levels = [item.get_attribute("aria-level") for item in page.locator("#branches [role=treeitem]").all()]
    assert levels == ["1", "2", "2", "3", "3", "1", "2"]

    page.click("#branches .branch:has-text('And then')")
    assert page.locator(".message.user").count() == 2
    page.click(".message.assistant >> nth=0 >> text=Branch")
    assert page.locator(".message").count() == 2
    send(page, "Elsewhere")
    assert page.locator("#branches [role=treeitem]").count() == 9
    assert page.locator(".message.user .text").all_inner_texts() == ["Question", "Elsewhere"]


def test_the_tree_and_the_versions_are_reached_by_keyboard(page: Any) -> None:
    always_answer(page, "first")
    send(page, "Question")
    always_answer(page, "second")
    page.click("text=Regenerate")
    wait_until_done(page)
    page.click("[aria-label='Previous version']")
    assert answers(page) == ["first"]
    page.focus("#branches [tabindex='0']")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    assert answers(page) == ["second"]
    page.focus("#tab-play")
    page.keyboard.press("ArrowRight")
    assert page.is_visible("#live")
    assert page.evaluate("document.activeElement.id") == "tab-live"


def test_two_settings_side_by_side(page: Any) -> None:
    always_answer(page, "left")
    page.check("#compare")
    page.check("#variant-1")
    always_answer(page, "right")
    send(page, "Which?")
    assert answers(page) == ["left", "right"]
    boxes = [page.locator(".group .message").nth(number).bounding_box() for number in range(2)]
    assert abs(boxes[0]["y"] - boxes[1]["y"]) < 2
    assert boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]
    page.click(".group .message >> nth=1 >> text=Branch")
    page.uncheck("#compare")
    send(page, "And now?")
    assert answers(page) == ["right", "left"]  # settings A again, behind the answer of B


def test_several_answers_of_one_request(page: Any) -> None:
    set_options(page, n=3, max_tokens=5, ignore_eos=True, seed=1)
    send(page, "Three, please")
    assert page.locator(".group .message").count() == 3


def test_conversations_stay_in_the_browser(page: Any) -> None:
    always_answer(page, "kept")
    send(page, "Remember me")
    page.click("#new-chat")
    assert page.locator(".message").count() == 0
    send(page, "A second one")
    page.reload()
    page.wait_for_selector("#status.ok")
    assert page.inner_text(".message.user .text") == "A second one"
    assert page.locator(".conversation").all_inner_texts() == ["A second one", "Remember me"]
    page.click(".conversation:has-text('Remember me')")
    assert answers(page) == ["kept"]
    page.click("[aria-label='Delete Remember me']")
    assert page.locator(".conversation").all_inner_texts() == ["A second one"]


def test_a_completion_is_continued(page: Any) -> None:
    page.click("#new-text")
    always_answer(page, "abc")
    send(page, "Once")
    page.click("text=Continue")
    page.wait_for_selector(".message.assistant >> nth=1")
    wait_until_done(page)
    assert answers(page) == ["abc", "abc"]
    assert page.evaluate("document.querySelector('#used').textContent").startswith("context: ")


def test_options_have_the_names_and_defaults_of_the_api(page: Any, server: RunningServer) -> None:
    with server.http() as http:
        defaults = http.get("/v1/models").json()["data"][0]["sampling_defaults"]
        names = set(http.get("/openapi.json").json()["components"]["schemas"]["ChatRequest"]["properties"])
    for name in defaults:
        assert page.text_content(f"label[for=o-{name}]") == name
        assert page.get_attribute(f"#o-{name}", "placeholder") == f"{defaults[name]:g}"
    assert page.get_attribute("#o-max_tokens", "placeholder") == "rest of context"
    labels = page.locator("#fields label").all_text_contents()
    assert {label.split(".")[0] for label in labels} - names == {"constraint"}
    page.click("#new-text")
    assert page.get_attribute("#o-max_tokens", "placeholder") == "16"


def test_a_mistake_is_said(page: Any) -> None:
    set_options(page, temperature="hot")
    page.fill("#prompt", "Hello")
    page.press("#prompt", "Enter")
    assert "temperature is not a number: hot" in page.inner_text("#problem")
    assert page.get_attribute("#o-temperature", "aria-invalid") == "true"
    assert page.input_value("#prompt") == "Hello"  # nothing was sent
    set_options(page, temperature="-3")
    page.press("#prompt", "Enter")
    wait_until_done(page)
    assert "temperature" in page.inner_text("#problem")


def test_the_thread_follows_the_text_until_the_reader_scrolls(page: Any) -> None:
    always_answer(page, "line " * 12)
    for number in range(9):
        send(page, f"Question {number}\n" * 4)
    at_end = (
        "() => { const t = document.querySelector('#thread'); return t.scrollHeight - t.scrollTop - t.clientHeight }"
    )
    assert page.evaluate(at_end) < 60
    page.evaluate("document.querySelector('#thread').scrollTop = 0")
    page.wait_for_selector("#latest:not([hidden])")
    always_answer(page, "more")
    page.click(".message.assistant >> nth=0 >> text=Copy")
    assert page.evaluate("document.querySelector('#thread').scrollTop") < 60
    page.click("#latest")
    assert page.evaluate(at_end) < 60


def test_a_server_with_keys_asks_for_one(browser: Any) -> None:
    with running_server(keys=[KEY]) as server, open_page(browser, server) as page:
        page.wait_for_selector("#key-form:not([hidden])")
        page.fill("#key", KEY)
        page.click("#key-form button")
        page.wait_for_selector("#key-form", state="hidden")
        always_answer(page, "open")
        send(page, "Sesame")
        assert answers(page) == ["open"]
        page.click("#tab-live")
        page.wait_for_selector("#blocks[data-held]")
        assert page.locator("#key-form").is_hidden()


def test_a_real_chat(browser: Any, models_dir: Path) -> None:
    model = models_dir / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not model.is_file():
        pytest.skip(f"{model.name} is not in BIFOLIO_TEST_MODELS")
    engine = {"model": str(model), "kernels": None, "block_size": 16}
    with running_server(engine=engine) as server, open_page(browser, server) as page:
        page.check("#view-chances")
        set_options(page, temperature=0, max_tokens=40)
        send(page, "Write a haiku.")
        asked = [{"role": "user", "content": "Write a haiku."}]
        whole = server.client().chat.completions.create(model="tiny", messages=asked, temperature=0, max_tokens=40)
        assert answers(page)[0] == whole.choices[0].message.content.strip()
        assert "<|" not in page.inner_text("#messages")
        page.check("#view-text")
        send(page, "Another one.")
        assert "prompt tokens cached" in page.locator(".stats").last.inner_text()
