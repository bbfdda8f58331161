"""Tools of the page in a real browser: names, search, files of chats, models, saved system messages, keys, figures."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from page_chats import (
    FILL,
    FOREST,
    HOSTILE,
    READ_ALL,
    SEA,
    SEED,
    SHOW_DIALOGS,
    STORED,
    WRONG_FILES,
    bring,
    chat,
    empty,
    exported,
    load,
    names,
    node,
    saved,
)
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
from serving import RunningServer

from bifolio.serve.page import page_files
from bifolio.text.chat_template import check_messages

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def opened(server: RunningServer) -> Iterator[Any]:
    """One page for all tests: a new one takes as much time as most of them."""
    permissions = ["clipboard-read", "clipboard-write"]
    with chromium() as browser, open_page(browser, server, permissions=permissions) as page:
        yield page


@pytest.fixture
def page(opened: Any) -> Any:
    """The page with an empty storage."""
    empty(opened)
    return opened


# -- names and search --------------------------------------------------------------------------------------------------


def test_a_chat_is_renamed(page: Any) -> None:
    assert page.is_disabled("#rename")  # there is nothing to name yet
    always_answer(page, "yes")
    send(page, "A question")
    page.click("#rename")
    assert page.evaluate("document.activeElement.id") == "rename-name"
    page.fill("#rename-name", "")
    page.keyboard.press("Enter")
    assert page.is_visible("#rename-dialog")  # a name is required
    page.fill("#rename-name", f"  {HOSTILE}   here ")
    page.keyboard.press("Enter")
    page.wait_for_selector("#rename-dialog", state="hidden")
    assert page.inner_text("#title") == f"{HOSTILE} here"
    assert names(page) == [f"{HOSTILE} here"]
    assert page.locator("main img").count() == 0
    send(page, "Another question")
    load(page)
    assert names(page) == [f"{HOSTILE} here"]
    page.click("#rename")
    page.fill("#rename-name", "Not this one")
    page.keyboard.press("Escape")
    assert page.inner_text("#title") == f"{HOSTILE} here"
    assert page.evaluate("document.activeElement.id") == "rename"


def test_search_finds_titles_and_texts_of_every_branch(page: Any) -> None:
    page.evaluate(SEED, [FOREST, SEA])
    assert names(page) == ["Foxes", "Whales"]
    page.fill("#search", "whale")
    page.wait_for_selector("#found:has-text('1 chat found')")
    assert names(page) == ["Whales"]
    page.fill("#search", "WALDER europe")  # another branch than the open one, without regard to accents and case
    page.wait_for_selector("mark:text-is('Wälder')")
    page.wait_for_selector("#announce:has-text('1 chat found')", state="attached")
    page.click(".conversation:has-text('Foxes')")
    assert page.locator(".message .text").all_inner_texts() == [
        "Where do foxes live?",
        "In the Wälder of Europe.",
        "Thanks",
    ]
    assert page.inner_text(".message.found .text") == "In the Wälder of Europe."
    assert page.evaluate("document.activeElement.dataset.node") == "c"
    page.fill("#search", "foxes whales")
    page.wait_for_selector("#found:has-text('No chat has these words.')")
    page.fill("#search", "")
    page.wait_for_selector("#found", state="hidden")
    assert names(page) == ["Foxes", "Whales"]


def test_a_chat_that_is_deleted_while_it_is_answered_stays_deleted(page: Any) -> None:
    set_options(page, max_tokens=400, ignore_eos=True)
    page.fill("#prompt", "Go on")
    page.press("#prompt", "Enter")
    page.wait_for_selector(".stats:has-text('token')")
    page.click("[aria-label='Delete Go on']")
    page.wait_for_selector("#run:not([hidden])")
    assert page.evaluate(STORED) == []


# -- files -------------------------------------------------------------------------------------------------------------


def test_exported_chats_are_imported_elsewhere(page: Any) -> None:
    page.evaluate(SEED, [SEA])
    always_answer(page, "In *dens*.")
    page.fill("#system", "Be brief.")
    send(page, "Where do foxes live? #1")
    page.click("text=Regenerate")
    wait_until_done(page)
    name, text = saved(page, "#export-json")
    single = json.loads(text)
    assert name == "Where-do-foxes-live-1.json"
    check_messages(single["messages"])  # `bifolio chat` loads the open branch
    assert [message["role"] for message in single["messages"]] == ["system", "user", "assistant"]
    assert len(single["conversations"][0]["nodes"]) == 3
    assert saved(page, "#export-markdown") == (
        "Where-do-foxes-live-1.md",
        "# Where do foxes live? 1\n\n## System\n\nBe brief.\n\n"
        "## You\n\nWhere do foxes live? #1\n\n## Answer (tiny)\n\nIn *dens*.\n",
    )  # fmt: skip
    name, everything = saved(page, "#export-all")
    assert (name, len(json.loads(everything)["conversations"])) == ("bifolio-chats.json", 2)
    mine = page.evaluate(STORED)
    empty(page)
    assert bring(page, everything) == "chats.json holds 2 chats: 2 new."
    assert page.is_hidden("#import-choices")
    page.click("#import-run")
    page.wait_for_selector("#import-dialog", state="hidden")
    assert page.evaluate(STORED) == mine
    assert answers(page) == ["In dens."]
    assert page.input_value("#system") == "Be brief."
    assert "token" in page.inner_text(".stats")
    assert bring(page, text) == "chats.json holds 1 chat: 0 new, 1 already here."
    assert page.is_hidden("#import-run")
    page.click("#import-dialog [data-close]")
    messages = {"messages": single["messages"]}
    assert bring(page, messages, "saved.json") == "saved.json holds 1 chat: 1 new."
    page.click("#import-run")
    assert page.locator(".message").count() == 2
    assert len(names(page)) == 3


def test_a_chat_that_differs_is_never_replaced_without_a_choice(page: Any) -> None:
    page.evaluate(SEED, [SEA])
    theirs = deepcopy(SEA)
    theirs["nodes"][1]["text"] = "A mile."

    def texts() -> list[tuple[str, str]]:
        return sorted((each["title"], each["nodes"][1]["text"]) for each in page.evaluate(STORED))

    for choice, expected in (
        ("import-mine", [("Whales", "Very deep.")]),
        ("import-keep", [("Whales", "Very deep."), ("Whales (imported)", "A mile.")]),
        ("import-theirs", [("Whales", "A mile."), ("Whales (imported)", "A mile.")]),
    ):
        assert bring(page, exported(theirs)) == "chats.json holds 1 chat: 0 new, 1 here with other messages."
        assert page.is_checked("#import-keep")
        page.check(f"#{choice}")
        page.click("#import-run")
        page.wait_for_selector("#import-dialog", state="hidden")
        assert texts() == expected


def test_files_that_are_not_chats_are_refused_by_name(page: Any) -> None:
    page.evaluate(SEED, [SEA])
    texts = [record if isinstance(record, str) else json.dumps(record) for record, _ in WRONG_FILES]
    for found, (_, sentence) in zip(page.evaluate(READ_ALL, texts), WRONG_FILES, strict=True):
        assert str(found).startswith(sentence)
    assert bring(page, "{", f"{HOSTILE}.json") == f"{HOSTILE}.json cannot be imported: it is no JSON."
    assert page.is_hidden("#import-run")
    assert page.locator("dialog img").count() == 0
    assert len(page.evaluate(STORED)) == 1


def test_an_import_evicts_no_chat_from_a_full_storage(page: Any) -> None:
    page.evaluate(SEED, [SEA])
    page.evaluate(FILL)
    long = chat("long", "Long", node("a", None, "user", "x" * 100_000))
    bring(page, exported(long))
    page.click("#import-run")
    page.wait_for_selector("#import-summary:has-text('0 chats imported. 1 chat did not fit')")
    assert [each["title"] for each in page.evaluate(STORED)] == ["Whales"]


# -- models and system messages ----------------------------------------------------------------------------------------


def test_one_model_of_several_is_chosen(page: Any) -> None:
    assert page.locator("#model option").all_text_contents() == ["tiny · 512 tokens"]
    cards = [
        {"id": "tiny", "max_model_len": 512, "sampling_defaults": {"temperature": 0.25}},
        {"id": "large", "max_model_len": 4096, "sampling_defaults": {"temperature": 0.75}},
        {"id": "bare"},
    ]
    page.route("**/v1/models", lambda route: route.fulfill(json={"object": "list", "data": cards}))
    load(page)
    assert page.input_value("#model") == "tiny"
    assert page.get_attribute("#o-temperature", "placeholder") == "0.25"
    page.select_option("#model", "large")
    assert page.get_attribute("#o-temperature", "placeholder") == "0.75"
    with page.expect_request("**/v1/chat/completions") as asked:
        send(page, "Who are you?")
    assert asked.value.post_data_json["model"] == "large"
    assert "large" in page.inner_text("#problem")  # the server serves one model, and names it
    assert page.inner_text(".stats").startswith("large · ")
    page.unroute("**/v1/models")
    load(page)
    assert page.input_value("#model") == "tiny"  # the server lists one model now
    page.evaluate("async (cards) => (await import('/page/models.js')).showModels(cards)", cards)
    assert page.input_value("#model") == "large"  # the choice stays
    page.select_option("#model", "tiny")
    always_answer(page, "yes")
    send(page, "And now?")
    assert answers(page)[-1] == "yes"


def test_system_messages_are_saved_chosen_edited_and_deleted(page: Any) -> None:
    assert page.is_disabled("#saved-prompt")
    page.fill("#system", "You are a pirate.")
    page.click("#save-prompt")
    assert page.input_value("#prompt-text") == "You are a pirate."
    page.click("#prompts-form [type=submit]")
    assert page.inner_text("#prompt-problem") == "A name and a text are needed."
    page.fill("#prompt-name", HOSTILE)
    page.keyboard.press("Enter")
    page.fill("#prompt-name", "Poet")
    page.fill("#prompt-text", "You rhyme.")
    page.click("#prompts-form [type=submit]")
    page.fill("#prompt-name", "Poet")
    page.fill("#prompt-text", "Another one.")
    page.click("#prompts-form [type=submit]")
    assert page.inner_text("#prompt-problem") == '"Poet" exists: choose another name, or edit that one.'
    page.click("[aria-label='Edit Poet']")
    page.fill("#prompt-text", "You rhyme, always.")
    page.click("#prompts-form [type=submit]")
    assert page.locator("#prompts .name").all_inner_texts() == [HOSTILE, "Poet"]
    assert page.locator("#prompts img").count() == 0
    page.keyboard.press("Escape")
    load(page)
    page.click("#new-chat")
    assert page.input_value("#system") == ""
    page.select_option("#saved-prompt", label="Poet")
    assert page.input_value("#system") == "You rhyme, always."
    always_answer(page, "yes")
    with page.expect_request("**/v1/chat/completions") as asked:
        send(page, "Hello")
    assert asked.value.post_data_json["messages"][0] == {"role": "system", "content": "You rhyme, always."}
    page.click("#manage-prompts")
    page.click(f'[aria-label="Use {HOSTILE}"]')
    assert page.input_value("#system") == "You are a pirate."
    page.click("#manage-prompts")
    page.click("[aria-label='Delete Poet']")
    assert page.locator("#prompts .name").all_inner_texts() == [HOSTILE]
    page.keyboard.press("Escape")
    many = [{"id": str(n), "name": f"n{n}", "text": "t"} for n in range(100)] + ["damaged"]
    page.evaluate("(many) => localStorage.setItem('bifolio:prompts', JSON.stringify(many))", many)
    page.click("#save-prompt")
    page.fill("#prompt-name", "One more")
    page.keyboard.press("Enter")
    assert page.inner_text("#prompt-problem") == "There are 100 already: delete one first."


# -- keys, figures, other hosts, accessibility -------------------------------------------------------------------------


def test_keys(page: Any) -> None:
    active = "document.activeElement.id"
    always_answer(page, "copy me")
    send(page, "nsrc?")  # letters in a field are text
    assert page.locator(".message.user .text").all_inner_texts() == ["nsrc?"]
    page.keyboard.press("Escape")
    assert page.evaluate(active) == "thread"
    page.keyboard.press("?")
    assert page.is_visible("#keys-dialog")
    page.keyboard.press("n")  # a dialog keeps its keys
    page.keyboard.press("Escape")
    assert page.is_hidden("#keys-dialog")
    assert page.locator(".message").count() == 2
    page.keyboard.press("c")
    page.wait_for_selector("#announce:has-text('The answer was copied.')", state="attached")
    assert page.evaluate("navigator.clipboard.readText()") == "copy me"
    page.keyboard.press("Alt+n")  # keys with modifiers belong to the browser
    assert page.locator(".message").count() == 2
    page.keyboard.press("r")
    page.wait_for_selector(".switcher:has-text('2 / 2')")
    wait_until_done(page)
    page.click("#tab-live")
    page.keyboard.press("s")
    assert page.evaluate(active) == "search"
    assert page.is_visible("#play")
    page.keyboard.press("Tab")
    page.keyboard.press("i")
    assert page.evaluate(active) == "prompt"
    page.keyboard.press("Escape")
    page.keyboard.press("n")
    assert page.locator(".message").count() == 0
    assert page.evaluate(active) == "prompt"
    page.click("#show-keys")
    page.uncheck("#single-keys")
    page.keyboard.press("Escape")
    load(page)
    page.focus("#thread")
    page.keyboard.press("?")
    assert page.is_hidden("#keys-dialog")  # turned off
    page.click("#show-keys")
    assert page.is_visible("#keys-dialog")


def test_every_key_is_documented() -> None:
    source = page_files()["/page/keys.js"][0].decode()
    shortcuts = re.findall(r'\["(.)", "[^"]+", "(\w+)"\]', source)
    document = (Path(__file__).parents[2] / "docs" / "page.md").read_text(encoding="utf-8")
    assert {key for key, _ in shortcuts} == set("?nsirc")
    for key, _ in shortcuts:
        assert f"| `{key}` |" in document


def test_figures_of_an_answer(page: Any) -> None:
    set_options(page, max_tokens=20, ignore_eos=True, seed=1, temperature=0)
    send(page, "The same prompt, long enough to fill several blocks of the cache, twice")
    first = r"^20 tokens · (?:\d+ tokens/s · )?first after \d+ ms · \d+ of (\d+) prompt tokens cached \(\d+ %\) · "
    prompt = int(re.search(first, page.inner_text(".stats"))[1])  # type: ignore[index]
    page.click("text=Regenerate")
    page.wait_for_selector(".switcher:has-text('2 / 2')")
    wait_until_done(page)
    shown = re.search(r"(\d+) of (\d+) prompt tokens cached \((\d+) %\)", page.inner_text(".stats"))
    assert shown is not None
    cached, total, share = map(int, shown.groups())
    assert total == prompt
    assert 0 < cached < total
    assert share == round(100 * cached / total)
    load(page)
    assert page.inner_text(".stats").startswith("20 tokens · ")
    assert "Time to first token" in page.locator(".stats span[title*=first]").last.get_attribute("title")


def test_no_file_of_the_page_names_another_host(server: RunningServer) -> None:
    """In all tests the browser resolves no name of a host, and `open_page` fails on a request to any other."""
    with server.http() as http:
        policy = http.get("/").headers["content-security-policy"]
    assert policy == (
        "default-src 'self'; img-src 'self' blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    for path, (content, _) in page_files().items():
        text = content.decode().replace("http://www.w3.org/2000/svg", "")  # a name of XML, never fetched
        assert not re.findall(r"""["'`(]\s*(?:https?:)?//[\w.-]+\.\w+""", text), path


def test_axe_finds_nothing_in_the_dialogs(page: Any) -> None:
    page.evaluate(SEED, [FOREST, SEA])
    poet = [{"id": "1", "name": "Poet", "text": "Rhyme."}]
    page.evaluate("(prompts) => localStorage.setItem('bifolio:prompts', JSON.stringify(prompts))", poet)
    load(page)
    page.fill("#search", "deep")
    page.wait_for_selector("mark")
    theirs = {**SEA, "title": "Deep"}
    try:
        page.set_viewport_size(PHONE)
        for button in ("rename", "manage-prompts", "show-keys", None):
            page.evaluate(f"document.getElementById('{button}').click()") if button else bring(page, exported(theirs))
            box = page.locator("dialog[open]").bounding_box()
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= PHONE["width"]
            page.keyboard.press("Escape")
    finally:
        page.set_viewport_size(DESKTOP)
    page.evaluate(SHOW_DIALOGS)
    found = axe_findings(page)
    page.evaluate("document.documentElement.dataset.theme = 'dark'")
    assert found + axe_findings(page) == []
