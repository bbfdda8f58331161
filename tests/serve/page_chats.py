"""Chats for tests of the page: two of them, files that hold them, and scripts that run in the browser."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

HOSTILE = "<img src=x onerror=alert(1)>"
SEED = """async (chats) => {
  const store = await import('/page/store.js');
  for (const chat of chats) store.save(chat);
  dispatchEvent(new StorageEvent('storage', { key: null }));
}"""
STORED = """async () => (await import('/page/store.js')).all()"""
SHOW_DIALOGS = """() => {  // one below the other
  document.body.style.overflow = 'auto';
  for (const dialog of document.querySelectorAll('dialog')) {
    dialog.style.position = 'static';
    dialog.show();
  }
}"""
READ_ALL = """async (texts) => {
  const { ImportError, readChats } = await import('/page/transfer.js');
  return texts.map((text) => {
    try { return readChats(text, 'x.json').length; } catch (error) {
      if (error instanceof ImportError) return error.message;
      throw error;
    }
  });
}"""
FILL = """() => {
  let text = 'x'.repeat(1 << 20);
  for (let n = 0; text.length; n += 1) {
    try { localStorage.setItem(`filler:${n}`, text); } catch { text = text.slice(text.length / 2 + 1); }
  }
}"""


def node(id: str, parent: str | None, role: str, text: str, **fields: Any) -> dict[str, Any]:
    finish = {"finish": "stop"} if role == "assistant" else {}
    return {"id": id, "parent": parent, "role": role, "text": text, **finish, **fields}


def chat(id: str, title: str, *nodes: dict[str, Any], updated: int = 1) -> dict[str, Any]:
    return {"id": id, "title": title, "mode": "chat", "system": "", "nodes": list(nodes), "leaf": nodes[-1]["id"],
            "updated": updated}  # fmt: skip


FOREST = chat(
    "forest", "Foxes", node("a", None, "user", "Where do foxes live?"), node("b", "a", "assistant", "In dens."),
    node("c", "a", "assistant", "In the Wälder of Europe."), node("d", "c", "user", "Thanks"), updated=2,
)  # fmt: skip
SEA = chat(
    "sea", "Whales", node("e", None, "user", "How deep do whales dive?"), node("f", "e", "assistant", "Very deep.")
)


def empty(page: Any) -> None:
    page.evaluate("localStorage.clear()")
    load(page)


def load(page: Any) -> None:
    """Load the page anew."""
    page.reload()
    page.wait_for_selector("#model option", state="attached")


def names(page: Any) -> list[str]:
    return [str(text) for text in page.locator(".conversation .name").all_inner_texts()]


def saved(page: Any, button: str) -> tuple[str, str]:
    """Name and text of the file that a button offers."""
    with page.expect_download() as waiting:
        page.click(button)
    return waiting.value.suggested_filename, Path(waiting.value.path()).read_text(encoding="utf-8")


def bring(page: Any, record: Any, name: str = "chats.json") -> str:
    """The sentence of the import dialog for a file."""
    text = record if isinstance(record, str) else json.dumps(record)
    page.set_input_files("#import-file", {"name": name, "mimeType": "application/json", "buffer": text.encode()})
    page.wait_for_selector("#import-dialog[open]")
    return str(page.inner_text("#import-summary"))


def exported(*chats: dict[str, Any]) -> dict[str, Any]:
    return {"format": "bifolio-chats", "version": 1, "conversations": list(chats)}


def changed_file(**fields: Any) -> dict[str, Any]:
    return exported({**deepcopy(SEA), **fields})


def changed_message(**fields: Any) -> dict[str, Any]:
    return changed_file(nodes=[SEA["nodes"][0], {**SEA["nodes"][1], **fields}], leaf="e")


# Files of chats that cannot be read, and the beginning of the sentence about each.
WRONG_FILES: list[tuple[Any, str]] = [
    ("{", "it is no JSON"),
    ([], "it is no file of chats"),
    ({"format": "other", "conversations": []}, "it is no file of chats"),
    ({**exported(SEA), "version": 2}, "it has version 2 of the format, and this page reads version 1"),
    (exported(SEA, SEA), "it holds one chat twice"),
    (changed_file(id="../x"), "chat 1 has no id"),
    (changed_file(title=3), "chat 1 has no title"),
    (changed_file(mode="image"), "chat 1 is neither a chat nor a completion"),
    (changed_file(nodes=[]), "chat 1 has no messages"),
    (changed_file(leaf="x"), "chat 1 does not say which message is open"),
    (changed_message(parent="f"), "chat 1, message 2, answers a message that does not stand before it"),
    (changed_message(id="e"), "chat 1, message 2, has no id of its own"),
    (changed_message(role="tool"), "chat 1, message 2, has no role"),
    (changed_message(text=None), "chat 1, message 2, has no text"),
    (changed_message(finish={}), "chat 1, message 2, has a wrong finish"),
    (changed_message(stats={"tokens": "1"}), "chat 1, message 2, has wrong figures"),
    ({"messages": [{"role": "user", "content": []}]}, "message 1 has no text"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "message 1 has no role that this page shows"),
    ({"messages": []}, "it has no messages"),
]
