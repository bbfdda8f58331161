"""Syntax trees of `src/`, parsed once for all rules that are asserted on them."""

from __future__ import annotations

import ast
import gc
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TypeVar

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "bifolio"
Node = TypeVar("Node", bound=ast.AST)


@cache
def source_trees() -> dict[str, ast.Module]:
    """The syntax tree of every file, by its path in the package.

    The trees live as long as the process: no collection of garbage looks at their nodes.
    """
    paths = sorted(PACKAGE.rglob("*.py"))
    gc.disable()
    try:
        return {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in paths}
    finally:
        gc.freeze()
        gc.enable()


def nodes(tree: ast.AST, *kinds: type[Node]) -> Iterator[Node]:
    """The nodes of a tree that are of one of these classes, class after class; subclasses do not count."""
    found = _by_class(tree)
    for kind in kinds:
        yield from found.get(kind, ())  # type: ignore[misc]


@cache
def _by_class(tree: ast.AST) -> dict[type[ast.AST], list[ast.AST]]:
    found = defaultdict(list)
    for node in ast.walk(tree):
        found[type(node)].append(node)
    return dict(found)
