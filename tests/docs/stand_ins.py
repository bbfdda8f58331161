"""Small files under the names that documented commands use: models, texts, traces, prompts."""

from __future__ import annotations

import json
import lzma
import re
import shlex
import shutil
from functools import cache
from itertools import pairwise
from pathlib import Path

from bifolio.model.gguf.writer import write_gguf
from bifolio.model.loader import load_model
from bifolio.quant.formats import QuantFormat
from helpers import CORPUS, END_OF_TEXT, fresh_folder, tiny_folder

CHAT = (
    "{% if tools %}<tool_call>{{ tools | tojson }}</tool_call>{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
)
TEXT = END_OF_TEXT.join(f"Story {number}. {sentence}\n" for number in range(200) for sentence in CORPUS)
PAGE = TEXT[: len(TEXT) // 20]  # enough where nothing is learnt from it
OUTPUT_OPTIONS = {"--output", "-o", "--out", "--plot", "--json", "--save"}
TWO_FILES = ("quantize", "merge", "edit")  # verbs whose second argument is the file to write
SUFFIXES = (".gguf", ".txt", ".xz", ".jsonl", ".csv", ".json")
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:17:0{number}.9799600,{20 + 8 * number},{4 + number}\n" for number in range(4)
)
MOONCAKE = "".join(
    json.dumps({"timestamp": 300 * number, "input_length": 600, "output_length": 40, "hash_ids": [0, number]}) + "\n"
    for number in range(1, 5)
)
PROMPTS = "".join(
    json.dumps({"id": number, "prompt": text[:20], "max_tokens": 4}) + "\n" for number, text in enumerate(CORPUS)
)
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}


@cache
def model_folder() -> Path:
    return tiny_folder(
        fresh_folder("stand-in") / "folder",
        tokenizer=True,
        chat_template=CHAT,
        max_position_embeddings=8192,
        intermediate_size=64,
    )


@cache
def model_file() -> Path:
    path = fresh_folder("stand-in") / "model.gguf"
    write_gguf(path, load_model(model_folder()), QuantFormat.Q8_0)
    return path


def provide(command: str, folder: Path) -> None:
    """Put a small file in the place of everything that a command reads and that is not there."""
    words = shlex.split(command, comments=True)
    outputs = {after for word, after in pairwise(words) if word in OUTPUT_OPTIONS}
    verb = next((word for word in words[1:3] if word in TWO_FILES), None)
    if verb is not None:
        positional = [word for word in words[words.index(verb) + 1 :] if not word.startswith("-")]
        outputs.add(positional[1])
        (folder / positional[1]).unlink(missing_ok=True)
    for word in words:
        name = word.rpartition("=")[2]
        is_path = name.endswith((*SUFFIXES, "/")) or name.startswith("./")
        if is_path and name not in outputs and not name.startswith(("-", "/", "http")) and not (folder / name).exists():
            provide_one(folder / name, words)


def provide_named(text: str, folder: Path) -> None:
    """The same for the paths among the strings of a Python block."""
    for match in re.finditer(r"""["'](?P<name>(?:\./)?[\w./-]+)["']""", text):
        name = match["name"]
        if (name.endswith(SUFFIXES) or name.startswith("./")) and not (folder / name).exists():
            provide_one(folder / name, [])


def provide_one(path: Path, words: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    reads_text = any(word in ("train", "bifolio.train") or "train_char" in word for word in words)
    if path.suffix == ".gguf":
        shutil.copy(model_file(), path)
    elif path.suffix == ".txt":
        text = TEXT if reads_text else PAGE
        path.write_text("first-api-key\nsecond-api-key\n" if "key" in path.name else text, encoding="utf-8")
    elif path.suffix == ".xz":
        path.write_bytes(lzma.compress(TEXT.encode()))
    elif path.suffix == ".csv":
        path.write_text(AZURE, encoding="utf-8")
    elif path.suffix == ".jsonl":
        path.write_text(MOONCAKE if {"trace", "fleet"} & set(words) else PROMPTS, encoding="utf-8")
    elif path.suffix == ".json":
        path.write_text(json.dumps(SCHEMA), encoding="utf-8")
    elif reads_text:
        path.mkdir()
        (path / "text.txt").write_text(TEXT, encoding="utf-8")
    else:
        shutil.copytree(model_folder(), path)
