"""Hooks of the documentation site.

Pages link to files of the repository outside of docs/. The site does not have these files: their links become text.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#\s]+)(#[^)\s]*)?\)")
LEFT_OUT = ("grafana-dashboard.json",)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace links that leave docs/ by their texts."""
    folder = posixpath.dirname(page.file.src_uri)

    def replaced(found: re.Match[str]) -> str:
        target = found[2]
        if "://" in target:
            return found[0]
        path = posixpath.normpath(posixpath.join(folder, target))
        return found[1] if path.startswith("..") or path in LEFT_OUT else found[0]

    return LINK.sub(replaced, markdown)
