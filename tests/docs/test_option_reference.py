"""The pages of docs/reference are those of the code, and the terms of the field lead to a heading."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from doc_blocks import ROOT

SCRIPT = ROOT / "scripts" / "reference_pages.py"
TERMS = (
    "prefix caching",
    "paged attention",
    "continuous batching",
    "speculative decoding",
    "chunked prefill",
    "structured output",
    "KV cache quantisation",
    "tensor parallelism",
    "disaggregated prefill",
)


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    pytest.importorskip("starlette")
    spec = importlib.util.spec_from_file_location("reference_pages", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.full
def test_pages_are_those_of_the_code(tmp_path: Path) -> None:
    pytest.importorskip("starlette")
    code = (
        "import json, sys; sys.path.insert(0, sys.argv[1]); import reference_pages as r; "
        "print(json.dumps({str(path): path.read_text('utf-8') == text for path, text in r.pages().items()}))"
    )
    environment = {**os.environ, "HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    command = [sys.executable, "-c", code, str(SCRIPT.parent)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert "false" not in done.stdout, f"run python scripts/reference_pages.py: {done.stdout}"


def test_every_option_of_a_verb_has_a_row(reference: ModuleType) -> None:
    from bifolio.cli.completion import options_of
    from bifolio.cli.main import build_app

    page = (ROOT / "docs" / "reference" / "command-line.md").read_text("utf-8")
    sections = dict(re.findall(r"^## bifolio ([\w ]+)\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))
    for verb, options in options_of(build_app()):
        for option in options:
            if option.startswith("--") and not option.startswith(("--help", "--no-")):
                assert f"`{option}`" in sections[verb], f"bifolio {verb} {option}"


def test_a_field_without_a_meaning_is_named(reference: ModuleType) -> None:
    class Unknown:
        pass

    with pytest.raises(reference.MissingMeaningError, match=r"Unknown\.nothing"):
        reference.meaning_of(Unknown, "nothing")


@pytest.mark.parametrize("term", TERMS)
def test_a_term_of_the_field_has_a_heading_and_a_way_on(term: str) -> None:
    page = (ROOT / "docs" / "terms.md").read_text("utf-8")
    found = re.search(rf"^## {term}$\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL | re.IGNORECASE)
    assert found is not None, f"docs/terms.md does not explain {term}"
    assert re.search(r"\]\([\w/-]+\.md", found[1]), f"{term} leads nowhere"
