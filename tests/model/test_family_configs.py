"""The configuration of every family, field by field, from `config.json` and from the header of a GGUF file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from family_cases import EXPECTED, EXPECTED_MOE, GGUF_CASES, HF_CASES, describe, open_case

from bifolio.model.gguf.loader import config_from_gguf
from bifolio.model.huggingface.config import config_from_hf


@pytest.fixture(scope="module")
def expected() -> dict[str, dict[str, Any]]:
    parts = [json.loads(path.read_text()) for path in (EXPECTED, EXPECTED_MOE)]
    return {kind: {**parts[0][kind], **parts[1][kind]} for kind in ("hf", "gguf")}


@pytest.mark.parametrize("name", HF_CASES)
def test_a_folder_describes_this_network(name: str, expected: dict[str, dict[str, Any]]) -> None:
    assert describe(config_from_hf(HF_CASES[name])) == expected["hf"][name]


@pytest.mark.parametrize("name", GGUF_CASES)
def test_a_gguf_file_describes_this_network(name: str, expected: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    assert describe(config_from_gguf(open_case(GGUF_CASES[name], tmp_path))) == expected["gguf"][name]


def test_the_table_has_no_other_lines(expected: dict[str, dict[str, Any]]) -> None:
    assert expected["hf"].keys() == HF_CASES.keys()
    assert expected["gguf"].keys() == GGUF_CASES.keys()
