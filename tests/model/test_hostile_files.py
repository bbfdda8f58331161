"""Sizes and pipelines in model files that no real model has are refused by a named error, before memory is taken."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from bifolio.errors import BifolioError, ModelFileError, RequestError
from bifolio.model.huggingface.config import config_from_hf
from bifolio.text.tokenizer import Tokenizer
from helpers import TINY, tiny_folder

HUGE = 1 << 45


@pytest.mark.parametrize(
    "change",
    [
        {"head_dim": HUGE},
        {"num_hidden_layers": HUGE, "sliding_window": 8},
        {"partial_rotary_factor": 1e15},
        {"vocab_size": HUGE},
        {"hidden_size": HUGE},
        {"intermediate_size": HUGE},
        {"max_position_embeddings": HUGE},
        {"num_attention_heads": HUGE, "num_key_value_heads": HUGE},
        {"model_type": []},
        {"model_type": {"a": 1}},
        {"num_hidden_layers": "many"},
        {"rope_scaling": {"rope_type": "longrope", "long_factor": [1.0] * 100_000, "short_factor": [1.0]}},
        {"sliding_window_pattern": [], "layer_types": 7},
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 0.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
        {
            "model_type": "phi3",
            "original_max_position_embeddings": 64,
            "rope_scaling": {"type": "longrope", "long_factor": [1.0] * 3, "short_factor": [1.0] * 3},
        },
    ],
    ids=str,
)
def test_sizes_beyond_any_real_model_are_refused(change: dict[str, Any]) -> None:
    raw = {**TINY, **change}
    if "layer_types" in change:
        raw["model_type"] = "gemma3_text"
    with pytest.raises(BifolioError):
        config_from_hf(raw)


def tokenizer_with(tmp_path: Path, **parts: Any) -> Path:
    raw = json.loads((tiny_folder(tokenizer=True) / "tokenizer.json").read_text())
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({**raw, **parts}))
    return path


def replace(content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": "a"}, "content": content}


@pytest.mark.full
@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": replace("b" * (1 << 20))},
        {"normalizer": {"type": "Sequence", "normalizers": [replace("aa")] * 24}},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}] * 100}},
        {
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}] * 300_000,
                "pair": [],
                "special_tokens": {},
            }
        },
        {
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "x", "type_id": 0}}] * 200,
                "pair": [],
                "special_tokens": {"x": {"id": "x", "ids": [1] * 100_000, "tokens": ["a"] * 100_000}},
            }
        },
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////w=="}},
        {"decoder": {"type": "Strip", "content": "a", "start": 1 << 40, "stop": 0}},
        {"model": {"type": "BPE", "vocab": {"a": 1 << 31}, "merges": []}},
        {"model": None},
        {"decoder": {"type": "none of ours"}},
    ],
    ids=[
        "long replacement",
        "doublings",
        "many steps",
        "many entries",
        "many ids",
        "damaged table",
        "large count",
        "large id",
        "no model",
        "unknown decoder",
    ],
)
def test_hostile_tokenizers_are_refused(tmp_path: Path, parts: dict[str, Any]) -> None:
    with pytest.raises(ModelFileError):
        Tokenizer.from_file(tokenizer_with(tmp_path, **parts))


@pytest.mark.parametrize(
    "parts",
    [
        {"padding": {"strategy": {"Fixed": 1 << 40}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
                     "pad_type_id": 0, "pad_token": "a"}},
        {"truncation": {"max_length": 1, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}},
    ],
    ids=["padding", "truncation"],
)  # fmt: skip
def test_prompts_are_neither_padded_nor_cut(tmp_path: Path, parts: dict[str, Any]) -> None:
    plain = Tokenizer.from_file(tokenizer_with(tmp_path))
    expected = plain.encode("Once upon a time")
    assert Tokenizer.from_file(tokenizer_with(tmp_path, **parts)).encode("Once upon a time") == expected


@pytest.mark.full
def test_a_catastrophic_pattern_refuses_a_text_and_no_more(tmp_path: Path) -> None:
    """The regex engine gives up with a panic of its Rust code, which is no Exception."""
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    tokenizer = Tokenizer.from_file(tokenizer_with(tmp_path, pre_tokenizer=split))
    with contextlib.suppress(RequestError):
        tokenizer.encode("a" * 40 + "b")
    assert tokenizer.encode("b")
