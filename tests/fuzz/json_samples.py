"""Valid `config.json` and `tokenizer.json` files, as data."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from helpers import TINY, tiny_tokenizer

sys.path.append(str(Path(__file__).parents[1] / "model"))
from family_cases import HF_CASES

FAMILY_CONFIGS: dict[str, Any] = dict(HF_CASES)
CONFIG: dict[str, Any] = {
    **TINY,
    "head_dim": 8,
    "sliding_window": None,
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "torch_dtype": "float32",
    "transformers_version": "4.50.0",
}
SPLIT = {"type": "Split", "pattern": {"Regex": "[0-9]|\\s+"}, "behavior": "Isolated", "invert": False}
ADDED = [
    {
        "id": 0,
        "content": "<s>",
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    },
    {
        "id": 1,
        "content": "</s>",
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    },
]
AROUND = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
}


def TOKENIZERS() -> dict[str, dict[str, Any]]:  # noqa: N802
    """A tokenizer of every kind of model, with the parts of a pipeline that real ones have."""
    byte_level = json.loads(tiny_tokenizer().to_str())
    letters = [chr(code) for code in range(32, 127)]
    pieces = ["<s>", "</s>", "<unk>", *[f"<0x{byte:02X}>" for byte in range(256)], *letters, "\u2581", "\u2581He", "ll"]
    whole = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": ADDED, "post_processor": AROUND}
    fallback = {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    }
    metaspace = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}
    cleaning = {
        "type": "Sequence",
        "normalizers": [
            {"type": "NFC"},
            {"type": "Prepend", "prepend": "\u2581"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
        ],
    }
    words = {word: number for number, word in enumerate(pieces)}
    return {
        "byte level": {
            **byte_level,
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [
                    SPLIT,
                    {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
                ],
            },
        },
        "byte fallback": {
            **whole,
            "normalizer": cleaning,
            "pre_tokenizer": None,
            "decoder": fallback,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": "<unk>",
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": True,
                "byte_fallback": True,
                "ignore_merges": False,
                "vocab": words,
                "merges": [["l", "l"]],
            },
        },
        "unigram": {
            **whole,
            "normalizer": cleaning,
            "pre_tokenizer": metaspace,
            "decoder": {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always"},
            "model": {
                "type": "Unigram",
                "unk_id": 2,
                "byte_fallback": False,
                "vocab": [[piece, -float(number)] for number, piece in enumerate(pieces)],
            },
        },
        "word piece": {
            **whole,
            "normalizer": {
                "type": "BertNormalizer",
                "clean_text": True,
                "handle_chinese_chars": True,
                "strip_accents": None,
                "lowercase": True,
            },
            "pre_tokenizer": {"type": "BertPreTokenizer"},
            "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
            "model": {
                "type": "WordPiece",
                "unk_token": "<unk>",
                "continuing_subword_prefix": "##",
                "max_input_chars_per_word": 100,
                "vocab": {**words, "##a": len(words)},
            },
        },
    }
