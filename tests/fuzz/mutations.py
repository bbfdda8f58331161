"""Seeded damage to files: bytes of a header, or values of a JSON document."""

from __future__ import annotations

import copy
import json
import random
import struct
from typing import Any

from samples import Sample

INTERESTING = [
    0,
    1,
    2,
    3,
    7,
    31,
    32,
    33,
    127,
    255,
    256,
    2**15,
    2**16,
    2**24,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**32,
    2**40,
    2**48,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 32,
    2**64 - 1,
]
VALUES: list[Any] = [
    *INTERESTING,
    -1,
    -(2**31),
    -(2**63),
    10**30,
    1e308,
    -1e308,
    1e-308,
    0.5,
    1.5,
    True,
    False,
    None,
    "",
    "a",
    "a" * 5000,
    "\x00",
    "\ud800",
    "\u2581",
    "llama",
    "gemma3_text",
    "yarn",
    "longrope",
    "dynamic",
    "mrope",
    "full_attention",
    [],
    [[]],
    {},
    [None],
    [0] * 1000,
    [1.0] * 70_000,
    ["full_attention"] * 3,
    [[[[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]]]],
    {"type": "BPE"},
    {"rope_type": "yarn", "factor": 1e9, "rope_theta": 0},
    {"a": {"a": {"a": {}}}},
]
REPLACEMENTS: list[Any] = [
    {"type": "Replace", "pattern": {"String": ""}, "content": "ab"},
    {"type": "Replace", "pattern": {"String": "a"}, "content": "aaaaaaaa"},
    {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "b"},
    {"type": "Replace", "pattern": {"Regex": "("}, "content": "b"},
    {"type": "Replace", "pattern": {"Regex": ""}, "content": "a" * 60},
]
NORMALIZERS: list[Any] = [
    *REPLACEMENTS,
    {"type": "Precompiled", "precompiled_charsmap": "AAAAAAAA"},
    {"type": "Precompiled", "precompiled_charsmap": "/////w=="},
    {"type": "Precompiled", "precompiled_charsmap": "BAAAAAEAAAAAAAAA"},
    {"type": "Prepend", "prepend": "a" * 64},
    {"type": "NFKD"},
    {"type": "StripAccents"},
    {"type": "ByteLevel"},
    {
        "type": "BertNormalizer",
        "clean_text": True,
        "handle_chinese_chars": True,
        "strip_accents": True,
        "lowercase": True,
    },
]
SPLITS: list[Any] = [
    *[
        {"type": "Split", "pattern": {"Regex": regex}, "behavior": behavior, "invert": invert}
        for regex in (
            "(a+)+$",
            "(a|aa)+$",
            "(a*)*b{1000}{1000}",
            "(?:(?:(?:a{99}){99}){99}){99}",
            "(.*)*x",
            "a{99999}",
            "(?=(a+))\\1+$",
            "((((((((((a+)+)+)+)+)+)+)+)+)+)+b",
            "\\p{L}{0,5000}b",
            "",
        )
        for behavior, invert in (("Isolated", False), ("MergedWithNext", True))
    ],
    {"type": "Split", "pattern": {"String": ""}, "behavior": "Contiguous", "invert": False},
    {"type": "CharDelimiterSplit", "delimiter": "a"},
    {"type": "Digits", "individual_digits": True},
    {"type": "Punctuation", "behavior": "Isolated"},
    {"type": "UnicodeScripts"},
    {"type": "FixedLength", "length": 0},
    {"type": "FixedLength", "length": 2**40},
    {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": False},
    {"type": "Metaspace", "replacement": "a", "prepend_scheme": "always", "split": True},
    {"type": "WhitespaceSplit"},
]
DECODERS: list[Any] = [
    *REPLACEMENTS,
    {"type": "CTC", "pad_token": "", "word_delimiter_token": "", "cleanup": True},
    {"type": "BPEDecoder", "suffix": ""},
    {"type": "Strip", "content": "a", "start": 2**40, "stop": 2**40},
    {"type": "WordPiece", "prefix": "", "cleanup": True},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
PLACES: dict[str, list[Any]] = {  # of a tokenizer.json
    "normalizer": [*NORMALIZERS, {"type": "Sequence", "normalizers": NORMALIZERS[:3] * 20}],
    "pre_tokenizer": [*SPLITS, {"type": "Sequence", "pretokenizers": SPLITS[:4] * 15}],
    "decoder": [*DECODERS, {"type": "Sequence", "decoders": DECODERS * 4}],
    "padding": [
        {
            "strategy": strategy,
            "direction": "Right",
            "pad_to_multiple_of": multiple,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "a",
        }
        for strategy in ({"Fixed": 2**40}, {"Fixed": 10**7}, "BatchLongest")
        for multiple in (None, 0, 3, 10**7, 2**40)
    ],
    "truncation": [
        {"max_length": length, "strategy": strategy, "stride": stride, "direction": "Right"}
        for length in (0, 1, 2**40)
        for strategy in ("LongestFirst", "OnlySecond")
        for stride in (0, 1, 2**40)
    ],
    "post_processor": [
        {"type": "Sequence", "processors": [{"type": "ByteLevel"}] * 60},
        {
            "type": "RobertaProcessing",
            "sep": ["</s>", 2**32 - 1],
            "cls": ["<s>", 0],
            "trim_offsets": True,
            "add_prefix_space": True,
        },
        {
            "type": "TemplateProcessing",
            "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 200,
            "pair": [],
            "special_tokens": {},
        },
        {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "x", "type_id": 0}}],
            "pair": [],
            "special_tokens": {"x": {"id": "x", "ids": [1] * 100_000, "tokens": ["a"] * 100_000}},
        },
        {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "x", "type_id": 0}}] * 200,
            "pair": [],
            "special_tokens": {"x": {"id": "x", "ids": [1] * 100_000, "tokens": ["a"] * 100_000}},
        },
    ],
}
PARTS: list[Any] = [part for parts in PLACES.values() for part in parts]


def mutate(sample: Sample, rng: random.Random) -> bytes:
    """A damaged copy; of JSON documents some are damaged as values and some as bytes."""
    if sample.kind == "safetensors" and rng.random() < 0.7:
        return _mutate_tensors(sample, rng)
    if sample.header_bytes:
        content = mutate_bytes(sample.content, sample.header_bytes, rng)
        return content if rng.random() < 0.8 else _mutate_digits(content, rng)
    if rng.random() < 0.1:
        return mutate_bytes(sample.content, len(sample.content), rng)
    document = json.loads(sample.content)
    for _ in range(rng.choice([1, 1, 2, 4])):
        if sample.kind == "tokenizer" and rng.random() < 0.5:
            place = rng.choice(list(PLACES))
            document[place] = copy.deepcopy(rng.choice(PLACES[place]))
        else:
            document = mutate_json(document, rng)
            if not isinstance(document, dict):
                break
    return json.dumps(document).encode()


def _mutate_tensors(sample: Sample, rng: random.Random) -> bytes:
    """A safetensors file with another header, whose length is right."""
    document = json.loads(sample.content[8 : sample.header_bytes])
    for _ in range(rng.choice([1, 1, 2])):
        document = mutate_json(document, rng)
    header = json.dumps(document).encode()
    return len(header).to_bytes(8, "little") + header + sample.content[sample.header_bytes :]


def mutate_bytes(original: bytes, header_bytes: int, rng: random.Random) -> bytes:
    """One to four changes of the header."""
    content = bytearray(original)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        place = rng.randrange(min(header_bytes, len(content)) or 1)
        match rng.randrange(8):
            case 0:
                content[place] ^= 1 << rng.randrange(8)
            case 1:
                content[place] = rng.randrange(256)
            case 2:
                content[place : place + 8] = struct.pack("<Q", rng.choice(INTERESTING))
            case 3:
                content[place : place + 4] = struct.pack("<I", rng.choice(INTERESTING) & 0xFFFFFFFF)
            case 4:
                content[place : place + 8] = struct.pack("<Q", rng.getrandbits(64))
            case 5:
                del content[place : place + rng.randrange(1, 40)]
            case 6:
                start = rng.randrange(len(content))
                content[place:place] = content[start : start + rng.randrange(1, 64)]
            case 7:
                del content[rng.randrange(len(content)) :]
        if not content:
            break
    return bytes(content)


def _mutate_digits(content: bytes, rng: random.Random) -> bytes:
    """Exchange a number that is written out in digits, as safetensors headers have them."""
    digits = [i for i, byte in enumerate(content[:4096]) if 48 <= byte <= 57]
    if not digits:
        return content
    place = rng.choice(digits)
    new = rng.choice(["-1", "0", "1e9", "99999999999999999999", "1.5", "null", '"x"', "[]", "[[[[]]]]", "{}"])
    return content[:place] + new.encode() + content[place + 1 :]


def mutate_json(document: Any, rng: random.Random) -> Any:
    """One change of one place; places near the root are as likely as the many below them."""
    parent, key = None, None
    node = document
    while isinstance(node, dict | list) and node and rng.random() < 0.8:
        parent, key = node, rng.choice(list(node) if isinstance(node, dict) else range(len(node)))
        node = parent[key]
    if parent is None:
        return copy.deepcopy(rng.choice(VALUES)) if rng.random() < 0.1 else document
    node = copy.deepcopy(node)  # values of a document have one place each
    match rng.randrange(7):
        case 0 | 1:
            parent[key] = copy.deepcopy(rng.choice(VALUES))
        case 2:
            parent[key] = copy.deepcopy(rng.choice(PARTS))
        case 3:
            parent[key] = json.loads(json.dumps(_grown(node, rng)))
        case 4:
            del parent[key]
        case 5 if isinstance(parent, list):
            parent.extend(copy.deepcopy(node) for _ in range(rng.choice([1, 3, 300])))
        case 5:
            parent[rng.choice(list(parent))] = node
        case _:
            parent[key] = _other_number(node, rng)
    return document


def _grown(node: Any, rng: random.Random) -> Any:
    if isinstance(node, str):
        return node * rng.choice([2, 100, 5000])
    if isinstance(node, list):
        return node * rng.choice([2, 10, 300]) if len(node) < 1000 else node[:1]
    if isinstance(node, dict):
        return {"type": "Sequence", "normalizers": [node] * 3, "pretokenizers": [node] * 3, "decoders": [node] * 3}
    return [node] * rng.choice([1, 2, 64, 1000])


def _other_number(node: Any, rng: random.Random) -> Any:
    if isinstance(node, bool) or not isinstance(node, int | float):
        return copy.deepcopy(rng.choice(VALUES))
    return rng.choice([node * 2, node + 1, -node, node * 1000, node * 2**30, node / 3, 0])
