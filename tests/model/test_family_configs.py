"""The configuration of every family, field by field, from `config.json` and from the header of a GGUF file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from family_cases import EXPECTED, EXPECTED_MOE, GGUF_CASES, HF_CASES, describe, open_case

from bifolio.errors import ModelFileError
from bifolio.model.gguf.loader import config_from_gguf
from bifolio.model.huggingface.config import LAYER_COUNTS, config_from_hf


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


@pytest.mark.parametrize("name", [name for name in HF_CASES if "with" not in name])
def test_a_folder_with_too_many_layers_is_refused_before_lists_are_made(name: str) -> None:
    raw = HF_CASES[name]
    text = raw.get("text_config")
    for field in LAYER_COUNTS:
        with pytest.raises(ModelFileError, match=f"{field} = .* more layers than any real model"):
            config_from_hf({**raw, field: 10**15})
        if isinstance(text, dict):
            with pytest.raises(ModelFileError, match=f"{field} = .* more layers than any real model"):
                config_from_hf({**raw, "text_config": {**text, field: 10**15}})


@pytest.mark.parametrize(
    ("sizes", "share", "message"),
    [({"head_dim": 10**15, "global_head_dim": 10**15}, 0.25, "head_dim is 10+: it must be an integer from 1 to 8192"),
     ({}, 1e15, r"rope_parameters.full_attention.partial_rotary_factor is 10+.0: it must be a number from 0 to 1")],
    ids=["dims", "share"],
)  # fmt: skip
def test_a_rope_of_too_many_frequencies_is_refused_before_lists_are_made(
    sizes: dict[str, int], share: float, message: str
) -> None:
    full = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": share}
    ropes = {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    raw = HF_CASES["gemma4 of its row"]
    with pytest.raises(ModelFileError, match=message):
        config_from_hf({**raw, "text_config": {**raw["text_config"], **sizes, "rope_parameters": ropes}})


@pytest.mark.parametrize("name", GGUF_CASES)
def test_a_gguf_file_with_too_many_layers_is_refused_before_lists_are_made(name: str, tmp_path: Path) -> None:
    file = open_case(GGUF_CASES[name], tmp_path)
    architecture = file.metadata["general.architecture"]
    many = {**file.metadata, f"{architecture}.block_count": 2**47}
    with pytest.raises(ModelFileError, match="more than any real model"):
        config_from_gguf(replace(file, metadata=many))
