"""Every command and every Python block of README.md and docs/ is run; what cannot be run here says so in a marker."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from doc_blocks import ROOT, Block, Marker, MarkerError, all_blocks, blocks_of, commands_of
from doc_runner import DocumentedCommandError, Runner

BLOCKS = all_blocks()
CODE = [block for block in BLOCKS if block.kind in ("shell", "python")]


def has_gpu() -> bool:
    import torch

    return bool(torch.cuda.is_available())


@pytest.mark.parametrize(
    "block",
    [pytest.param(block, id=block.name, marks=[] if block.is_quick else [pytest.mark.full]) for block in CODE],
)
def test_block(block: Block, tmp_path: Path) -> None:
    Runner(tmp_path).run(block, block.marker.needs_gpu and has_gpu())


def test_every_block_says_what_it_is() -> None:
    unknown = [f"{block.name} ({block.language or 'no language'})" for block in BLOCKS if block.kind == "unknown"]
    assert not unknown, f"label them sh, python or text: {', '.join(unknown)}"


LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")


def links_of(page: Path) -> set[Path]:
    """Files of the repository that a page links to or shows."""
    found = LINK.findall(page.read_text(encoding="utf-8"))
    return {(page.parent / link).resolve() for link in found if "://" not in link}


@pytest.mark.parametrize(
    "page", sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]), ids=lambda page: page.name
)
def test_links_lead_to_files(page: Path) -> None:
    assert [str(link) for link in sorted(links_of(page)) if not link.exists()] == []


def test_the_readme_links_to_every_page_and_shows_the_page_and_the_cache_map() -> None:
    linked = links_of(ROOT / "README.md")
    pages = {page.resolve() for page in (ROOT / "docs").rglob("*.md")}
    assert pages - linked == set()
    images = (ROOT / "docs" / "images").resolve()
    assert {images / "page-desktop-light.png", images / "live-desktop-light.png"} <= linked


def test_the_package_is_installed_from_its_source_on_every_page() -> None:
    """It is on no package index, so `pip install bifolio` would fail or install something else."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    wrong = [page.name for page in pages if re.search(r"pip install (?:-\S+ )*['\"]?bifolio\b(?!-)", page.read_text())]
    assert wrong == []


def test_every_picture_is_shown_on_a_page() -> None:
    shown = set().union(*(links_of(page) for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]))
    pictures = {picture.resolve() for picture in (ROOT / "docs").rglob("*.png")}
    assert {picture.name for picture in pictures - shown} == set()


# -- the runner itself ----------------------------------------------------------------------------------------------

PAGE = """# Page

<!-- run: full; add "--steps 2" to "bifolio train" -->
```sh
bifolio train a.txt \\
    --output x   # a comment
# another one

echo "a # b"
```

Text about a marker that belongs to no block:
<!-- run: no: reason -->
and goes on.

```python
print(1)
```

    bifolio models

- a list

    bifolio is a word of this paragraph

~~~text
```
not code
```
~~~

```
some diagram
```
"""


def test_blocks_are_found_with_their_lines_languages_and_markers() -> None:
    found = list(blocks_of(PAGE, "page.md"))
    assert [(block.line, block.kind) for block in found] == [
        (5, "shell"),
        (17, "python"),
        (20, "shell"),
        (27, "none"),
        (33, "unknown"),
    ]
    assert found[0].marker == Marker(full=True, added=(("bifolio train", "--steps 2"),))
    assert [block.marker for block in found[1:]] == [Marker()] * 4
    assert [" ".join(command.split()) for command in commands_of(found[0])] == [
        "bifolio train a.txt --output x",
        'echo "a # b"',
    ]


@pytest.mark.parametrize("items", ["slow", "help", "no:", 'add "--x"', "full, needs-gpu", ""])
def test_markers_that_mean_nothing_are_refused(items: str) -> None:
    with pytest.raises(MarkerError):
        Marker.parse(items)


def run_text(text: str, folder: Path, marker: str = "", language: str = "sh") -> None:
    block = Block("page.md", 1, language, text, Marker.parse(marker) if marker else Marker())
    Runner(folder).run(block, has_gpu=False)


@pytest.mark.full
@pytest.mark.parametrize(
    ("text", "language", "marker", "message"),
    [
        ("bifolio generate --no-such-option", "sh", "", "this fails"),
        ("python -c 'raise ValueError'", "sh", "", "this fails"),
        ("true | false | true", "sh", "", "this fails"),
        ("pip install .", "sh", "", "mark it"),
        ("raise ValueError", "python", "", "this fails"),
        ("bifolio generate --no-such-option", "sh", "help: long", "has no option --no-such-option"),
        ("bifolio bench nothing --limit 2", "sh", "help: long", "this fails"),
        ("pip install '.[nothing]'", "sh", "help: long", "no extra nothing"),
        ("bifolio models", "sh", "needs-gpu", "must end with one sentence"),
        ("python -c 'raise ValueError'", "sh", "needs-gpu", "must end with one sentence"),
        ("bifolio serve -m nothing.bin", "sh", "", "did not become ready"),
    ],
)
def test_commands_that_do_not_work_are_found(
    text: str, language: str, marker: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(DocumentedCommandError, match=message):
        run_text(text, tmp_path, marker, language)


@pytest.mark.full
def test_models_are_pulled_from_this_machine(tmp_path: Path) -> None:
    run_text("bifolio pull smollm2\nbifolio pull hf:some/model\nbifolio pull hf:other/model:file.gguf", tmp_path)
    pulled = {path.name for path in (tmp_path / "home" / "cache" / "models").iterdir()}
    assert {"smollm2.gguf", "model", "file.gguf"} <= pulled


TOOLS = sorted(
    f"benchmarks.{path.parent.name}.{path.stem}"
    for folder in ("tools", "micro")
    for path in (ROOT / "benchmarks" / folder).glob("*.py")
    if path.stem != "__init__"
)
HELP_OF_ALL = """
import contextlib, io, json, runpy, sys, traceback

ends = {}
for module in sys.argv[1:]:
    sys.argv, end = [module, "--help"], 0
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            runpy.run_module(module, run_name="__main__")
        except SystemExit as raised:
            end = raised.code
        except BaseException:
            end = traceback.format_exc()
    ends[module] = end
print(json.dumps(ends))
"""


@pytest.fixture(scope="module")
def ends_of_help() -> dict[str, Any]:
    """How `--help` of every tool ends: one process, which loads torch and numpy once."""
    command = [sys.executable, "-c", HELP_OF_ALL, *TOOLS]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    ends: dict[str, Any] = json.loads(done.stdout)
    return ends


@pytest.mark.full
@pytest.mark.parametrize("module", TOOLS)
def test_every_tool_of_the_benchmarks_has_help(module: str, ends_of_help: dict[str, Any]) -> None:
    assert ends_of_help[module] in (0, None)
