"""The Dockerfile, the scripts of packages and the documentation site refer to things that exist."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")


def test_the_dockerfile_has_both_targets_and_copies_files_that_exist() -> None:
    assert re.findall(r"^FROM \S+ AS (\w+)$", DOCKERFILE, re.MULTILINE) == ["build", "cpu", "cuda"]
    copied = [shlex.split(line)[1:-1] for line in DOCKERFILE.splitlines() if re.match(r"COPY (?!--from)", line)]
    assert copied
    for source in (name for names in copied for name in names):
        assert (ROOT / source).exists(), source
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert not {name for names in copied for name in names} & set(ignored)


def test_the_command_of_the_image_is_one_of_bifolio() -> None:
    from bifolio.cli.serve import ServerOptions

    command = json.loads(re.findall(r"^CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)[0])
    assert command[0] == "serve"
    assert ServerOptions(host=command[command.index("--host") + 1]).host == "0.0.0.0"


@pytest.mark.parametrize("name", ["build-wheels", "check-wheel", "build-docs", "build-native", "check-no-compiler"])
def test_scripts_are_executable_and_parse(name: str) -> None:
    script = ROOT / "scripts" / name
    assert script.stat().st_mode & 0o111
    subprocess.run(["sh", "-n", str(script)], check=True)


def site() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    found: dict[str, Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    return found


def pages(entry: Any) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    return [page for inner in (entry.values() if isinstance(entry, dict) else entry) for page in pages(inner)]


def test_the_navigation_has_pages_that_exist_once_each() -> None:
    listed = pages(site()["nav"])
    docs = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    assert len(listed) == len(set(listed))
    assert set(listed) <= docs
    assert listed[0] == "index.md"


def test_objects_of_the_reference_exist() -> None:
    pytest.importorskip("starlette")
    for name in re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), re.MULTILINE):
        module, _, attribute = name.rpartition(".")
        if importlib.util.find_spec(name) if not attribute[0].isupper() else None:
            continue
        owner = importlib.import_module(module)
        assert (getattr(owner, attribute).__doc__ or "").strip(), name


def test_links_out_of_the_docs_become_text() -> None:
    spec = importlib.util.spec_from_file_location("mkdocs_hooks", ROOT / "scripts" / "mkdocs_hooks.py")
    assert spec is not None
    assert spec.loader is not None
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    page = SimpleNamespace(file=SimpleNamespace(src_uri="models/a.md"))
    text = "[one](../../src/x.md) [two](../server.md#tools) [three](https://x.org/a) ![p](../images/p.png)"
    assert hooks.on_page_markdown(text, page=page) == text.replace("[one](../../src/x.md)", "one")


@pytest.mark.slow
def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    command = [str(ROOT / "scripts" / "build-docs")]
    environment = {**os.environ, "OUTPUT": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr
    assert "SamplingParams" in (tmp_path / "api.html").read_text(encoding="utf-8")
