"""Imports point down: a package imports packages of its own layer or of the layers below it.

    cli -> serve, cluster, train, measure -> api -> engine -> schedule, sampling -> model, text, cache -> kernels
        -> quant -> modules of the top level

Every file is parsed, so imports inside functions, `if TYPE_CHECKING` imports and modules named in strings
(`import_module("bifolio.cli.serve")`, `["-m", "bifolio.serve.process.worker"]`) count like any other. Between two
packages of one layer, imports go in one direction only.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from syntax_trees import PACKAGE, nodes, source_trees

LAYERS = (
    ("",),  # modules of the top level
    ("quant",),
    ("kernels",),
    ("model", "text", "cache"),
    ("schedule", "sampling"),
    ("engine",),
    ("api",),
    ("serve", "cluster", "train", "measure"),
    ("cli",),
)
HEIGHT = {package: height for height, layer in enumerate(LAYERS) for package in layer}
TOP_FOLDERS = {"config"}  # their modules are modules of the top level
RESOURCES = {"models"}  # folders of data, without modules

# The public names and `python -m bifolio` stand above all layers although their files lie at the top level.
FACADE = {"__init__.py", "__main__.py"}

MODULE_NAME = re.compile(r"bifolio(\.[a-z_][a-z0-9_]*)+\.?")


def package_of(module: str) -> str:
    """`bifolio.cache.storage` -> `cache`; modules of the top level -> the empty name."""
    _, _, rest = module.partition(".")
    first = rest.split(".")[0]
    return first if first not in TOP_FOLDERS and (PACKAGE / first).is_dir() else ""


def imported_modules(source: str, path: str) -> Iterator[str]:
    """Every module of bifolio that a file imports or names; `path` is relative to the package."""
    return modules_in(ast.parse(source), path)


def modules_in(tree: ast.Module, path: str) -> Iterator[str]:
    for node in nodes(tree, ast.Import, ast.ImportFrom, ast.Constant):
        yield from modules_of(node, path)


def modules_of(node: ast.Import | ast.ImportFrom | ast.Constant, path: str) -> Iterator[str]:
    """Every module of bifolio that a statement imports or a constant names."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "bifolio")
    elif isinstance(node, ast.ImportFrom):
        base = absolute_base(node, path)
        if base.split(".")[0] == "bifolio":
            yield from (imported_from(base, alias.name) for alias in node.names)
    elif isinstance(node.value, str) and MODULE_NAME.fullmatch(node.value):
        yield node.value.rstrip(".")  # whole names, and the beginning of f"bifolio.cli.{verb}"


def absolute_base(node: ast.ImportFrom, path: str) -> str:
    if not node.level:
        return node.module or ""
    parents = ["bifolio", *Path(path).parts[:-1]]
    kept = parents[: len(parents) - node.level + 1]
    return ".".join([*kept, *([node.module] if node.module else [])])


def imported_from(base: str, name: str) -> str:
    """The module behind `from base import name`: a module of that name, the home of a public name, or the base."""
    if base == "bifolio":
        import bifolio

        if name in bifolio._HOME:
            return bifolio._HOME[name]
    location = PACKAGE.joinpath(*base.split(".")[1:], name)
    return f"{base}.{name}" if location.is_dir() or location.with_suffix(".py").is_file() else base


@cache
def imports() -> list[tuple[str, set[str]]]:
    """(path relative to the package, imported modules) of every file."""
    return [(path, set(modules_in(tree, path))) for path, tree in source_trees().items()]


def layer_of(path: str) -> str:
    first, _, rest = path.partition("/")
    return first if rest and first not in TOP_FOLDERS else ""


def upward_imports() -> set[tuple[str, str]]:
    found = set()
    for path, names in imports():
        if path in FACADE:
            continue
        height = HEIGHT[layer_of(path)]
        found |= {(path, name) for name in names if HEIGHT[package_of(name)] > height}
    return found


def test_every_package_has_a_layer() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and any(path.rglob("*.py"))}
    assert folders - RESOURCES - TOP_FOLDERS <= set(HEIGHT), "give the new package a place in LAYERS"


def test_imports_point_down() -> None:
    unexcused = sorted(upward_imports())
    assert not unexcused, "these imports point up: " + "; ".join(f"{path} imports {name}" for path, name in unexcused)


def test_packages_of_one_layer_do_not_import_each_other_both_ways() -> None:
    edges: dict[tuple[str, str], str] = {}
    for path, names in imports():
        own = layer_of(path)
        for name in sorted(names):
            other = package_of(name)
            if other != own and HEIGHT[other] == HEIGHT[own]:
                edges.setdefault((own, other), f"{path} imports {name}")
    circles = sorted(f"{edge}, but {edges[pair[::-1]]}" for pair, edge in edges.items() if pair[::-1] in edges)
    assert not circles, "; ".join(circles)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import bifolio.engine.build", "bifolio.engine.build"),
        ("def f():\n    from bifolio.engine import build", "bifolio.engine.build"),
        ("def f():\n    from bifolio.engine.build import SIZES", "bifolio.engine.build"),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from bifolio.api.llm import LLM", "bifolio.api.llm"),
        ("import_module('bifolio.serve.http.app')", "bifolio.serve.http.app"),
        ("import_module(f'bifolio.cli.{verb}')", "bifolio.cli"),
        ("run([sys.executable, '-m', 'bifolio.serve.process.worker'])", "bifolio.serve.process.worker"),
        ("from bifolio import LLM", "bifolio.api.llm"),
        ("from bifolio import config", "bifolio.config"),
        ("from . import interface", "bifolio.kernels.interface"),
        ("from ..engine.build import SIZES", "bifolio.engine.build"),
        ("from .. import engine", "bifolio.engine"),
    ],
)
def test_every_way_of_importing_is_seen(source: str, expected: str) -> None:
    assert expected in set(imported_modules(source, "kernels/select.py"))


def test_prose_is_no_import() -> None:
    assert not set(imported_modules("'see bifolio.engine.build for sizes'\n# bifolio.engine.build", "kernels/x.py"))
