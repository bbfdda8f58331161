"""Every command and every Python block of README.md and docs/ is run; what cannot be run here says so in a marker."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from doc_blocks import ROOT, Block, Marker, MarkerError, Shown, all_blocks, blocks_of, commands_of, walked_pages
from doc_runner import DocumentedCommandError, Runner, python_command
from doc_walk import PageWalk

BLOCKS = all_blocks()
PAGES = walked_pages()
CODE = [block for block in BLOCKS if block.kind in ("shell", "python")]


def has_gpu() -> bool:
    import torch

    return bool(torch.cuda.is_available())


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "block",
    [pytest.param(block, id=block.name, marks=[] if block.is_quick else [pytest.mark.full]) for block in CODE],
)
def test_block(block: Block, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Blocks of the full tier run in forks, which take seconds less than processes that import torch."""
    forks = None if block.is_quick else request.getfixturevalue("forks")
    Runner(tmp_path, forks).run(block, block.marker.needs_gpu and has_gpu())


@pytest.mark.full
@pytest.mark.parametrize("name", PAGES)
def test_page(name: str, tmp_path: Path) -> None:
    with PageWalk(tmp_path) as page:
        page.walk(PAGES[name])


def test_every_block_says_what_it_is() -> None:
    blocks = [*BLOCKS, *(block for page in PAGES.values() for block in page)]
    unknown = [f"{block.name} ({block.language or 'no language'})" for block in blocks if block.kind == "unknown"]
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


def test_the_readme_is_short_and_its_links_reach_every_page() -> None:
    """At most 100 lines, with the two commands that other tools run; every page is a few links away."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) <= 100
    for command in ('pip install . && bifolio generate "Once upon a time"', "pip install '.[test]' && pytest"):
        assert readme.splitlines().count(command) == 1
    reached: set[Path] = set()
    found = {ROOT / "README.md"}
    while found:
        reached |= found
        found = {link for page in found for link in links_of(page) if link.suffix == ".md" and link.exists()} - reached
    assert {page.resolve() for page in (ROOT / "docs").rglob("*.md")} - reached == set()


def test_the_readme_shows_pictures() -> None:
    linked = links_of(ROOT / "README.md")
    assert any(link.parent.name == "images" and link.exists() for link in linked)


def test_the_package_is_installed_from_its_source_on_every_page() -> None:
    """It is on no package index, so `pip install bifolio` would fail or install something else."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    wrong = [page.name for page in pages if re.search(r"pip install (?:-\S+ )*['\"]?bifolio\b(?!-)", page.read_text())]
    assert wrong == []


def test_every_picture_is_shown_on_a_page() -> None:
    shown = set().union(*(links_of(page) for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]))
    pictures = {picture.resolve() for kind in ("*.png", "*.svg") for picture in (ROOT / "docs").rglob(kind)}
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


def run_text(text: str, folder: Path, forks: str | None, marker: str = "", language: str = "sh") -> None:
    block = Block("page.md", 1, language, text, Marker.parse(marker) if marker else Marker())
    Runner(folder, forks).run(block, has_gpu=False)


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
    text: str, language: str, marker: str, message: str, tmp_path: Path, forks: str | None
) -> None:
    with pytest.raises(DocumentedCommandError, match=message):
        run_text(text, tmp_path, forks, marker, language)


@pytest.mark.full
def test_models_are_pulled_from_this_machine(tmp_path: Path, forks: str | None) -> None:
    run_text("bifolio pull smollm2\nbifolio pull hf:some/model\nbifolio pull hf:other/model:file.gguf", tmp_path, forks)
    pulled = {path.name for path in (tmp_path / "home" / "cache" / "models").iterdir()}
    assert {"smollm2.gguf", "model", "file.gguf"} <= pulled


SHOWN = """
```sh
echo one; echo two
```

<!-- output -->
```text
one
tw...
```
"""


def test_shown_output_belongs_to_the_code_before_it() -> None:
    (block,) = blocks_of(SHOWN, "page.md")
    assert block.shown == Shown("one\ntw...")
    with pytest.raises(MarkerError, match="no code"):
        list(blocks_of(SHOWN[SHOWN.index("<!--") :], "page.md"))


@pytest.mark.parametrize(
    ("shown", "output", "equal"),
    [
        ("a\nb", "a  \nb\n", True),
        ("a ... d", "a b\nc d", True),
        ("a", "ab", False),
        ("...b", "aba", False),
        ("a.b", "axb", False),
    ],
)
def test_dots_match_any_text(shown: str, output: str, equal: bool) -> None:
    assert Shown(shown).matches(output) == equal


@pytest.mark.full
def test_other_output_than_the_page_shows_is_found(tmp_path: Path) -> None:
    block = next(iter(blocks_of(SHOWN.replace("tw...", "three"), "page.md")))
    with pytest.raises(DocumentedCommandError, match="three"):
        Runner(tmp_path).run(block, has_gpu=False)


WALKED = """<!-- walk: in order -->
```sh
echo 41 > number
bifolio serve
```
```python
import urllib.request
number = int(open("number").read())
ready = urllib.request.urlopen("http://127.0.0.1:8000/ready").status
```
```python
print(number + 1, ready)
```
<!-- output -->
```text
42 200
```
<!-- session: cat -->
```text
> Hello
Hello
```
"""


@pytest.mark.full
def test_a_walked_page_keeps_its_folder_its_server_and_its_names(tmp_path: Path) -> None:
    blocks = list(blocks_of(WALKED, "page.md"))
    with PageWalk(tmp_path) as page:
        page.walk(blocks)
    wrong = list(blocks_of(WALKED.replace("42 200", "43 200"), "page.md"))
    (tmp_path / "again").mkdir()
    with PageWalk(tmp_path / "again") as page, pytest.raises(DocumentedCommandError, match="43 200"):
        page.walk(wrong)


TOOLS = sorted(
    f"benchmarks.{path.parent.name}.{path.stem}"
    for folder in ("tools", "micro")
    for path in (ROOT / "benchmarks" / folder).glob("*.py")
    if path.stem != "__init__"
)
HELP_OF_ALL = """
import contextlib, io, json, runpy, sys, traceback

sys.path.insert(0, sys.argv[1])  # a fork of a running process reads no PYTHONPATH
ends = {}
for module in sys.argv[2:]:
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
def ends_of_help(forks: str | None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """How `--help` of every tool ends: one process, which loads torch and numpy once."""
    source = tmp_path_factory.mktemp("help") / "help_of_all.py"
    source.write_text(HELP_OF_ALL)
    command = [*python_command(forks), str(source), str(ROOT), *TOOLS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ends: dict[str, Any] = json.loads(done.stdout)
    return ends


@pytest.mark.full
@pytest.mark.parametrize("module", TOOLS)
def test_every_tool_of_the_benchmarks_has_help(module: str, ends_of_help: dict[str, Any]) -> None:
    assert ends_of_help[module] in (0, None)
