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

import numpy as np
from encoder_models import VOCABULARY, add_modules, word_pieces

from bifolio.model.gguf.writer import write_gguf
from bifolio.model.huggingface.safetensors_file import write_safetensors
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


@cache
def encoder_folder() -> Path:
    """A small BERT of random weights with the modules of sentence-transformers."""
    folder, size, layers, rows = fresh_folder("stand-in") / "encoder", 48, 2, {"intermediate": 96}
    folder.mkdir()
    config = {
        "model_type": "bert", "architectures": ["BertModel"], "vocab_size": len(VOCABULARY), "hidden_size": size,
        "intermediate_size": rows["intermediate"], "num_hidden_layers": layers, "num_attention_heads": 4,
        "max_position_embeddings": 256, "type_vocab_size": 2, "pad_token_id": 0,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    word_pieces().save(str(folder / "tokenizer.json"))
    add_modules(folder, "mean")
    write_safetensors(folder / "model.safetensors", _bert_tensors(size, rows["intermediate"], layers))
    return folder


def _bert_tensors(size: int, wide: int, layers: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings": (len(VOCABULARY), size), "embeddings.position_embeddings": (256, size),
        "embeddings.token_type_embeddings": (2, size), "embeddings.LayerNorm": (size,),
    }  # fmt: skip
    parts = dict.fromkeys((f"attention.self.{name}" for name in ("query", "key", "value")), (size, size))
    parts |= {"attention.output.dense": (size, size), "intermediate.dense": (wide, size), "output.dense": (size, wide)}
    norms = dict.fromkeys(("attention.output.LayerNorm", "output.LayerNorm"), (size,))
    for layer in range(layers):
        shapes |= {f"encoder.layer.{layer}.{name}": shape for name, shape in {**parts, **norms}.items()}
    tensors = {}
    for name, shape in shapes.items():
        tensors[f"{name}.weight"] = 1.0 * (len(shape) == 1) + 0.15 * rng.standard_normal(shape)
        if "embeddings." not in name or len(shape) == 1:
            tensors[f"{name}.bias"] = 0.1 * rng.standard_normal(shape[0])
    return {name: tensor.astype(np.float32) for name, tensor in tensors.items()}


def folder_of(name: str) -> Path:
    """The model in the place of a folder or a repository: an encoder under the names of encoders."""
    return encoder_folder() if "MiniLM" in name else model_folder()


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
        shutil.copytree(folder_of(path.name), path)
