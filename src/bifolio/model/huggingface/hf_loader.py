"""A Hugging Face-layout folder: `config.json`, safetensors (one file or shards with an index), and the tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from bifolio.config import ModelConfig
from bifolio.errors import ModelFileError, UnsupportedModelError
from bifolio.model.families import family_of
from bifolio.model.huggingface.config import config_from_hf
from bifolio.model.huggingface.integer_weights import IntegerMap, read_packing
from bifolio.model.huggingface.json_file import read_json
from bifolio.model.huggingface.json_object import JsonObject
from bifolio.model.huggingface.safetensors_file import Tensors, open_safetensors
from bifolio.model.huggingface.scaled_tensors import FolderMap, read_block
from bifolio.model.huggingface.sentence_folder import read_pooling, without_language_head
from bifolio.model.huggingface.sentencepiece_file import read_tokenizer
from bifolio.model.huggingface.ternary_weights import TernaryMap, read_ternary
from bifolio.model.loaded import LoadedModel, TextModel
from bifolio.model.model_file import ModelFile, TensorSource
from bifolio.model.vision.families import vision_of
from bifolio.model.vision.tensors import TowerTensors
from bifolio.model.vision.tower import Vision
from bifolio.model.world_tokens import VOCABULARY_FILE, read_world
from bifolio.quant.tensor import QuantizedTensor
from bifolio.text.tokenizer import Tokenizer

__all__ = ["FolderTensors", "folder_tensors", "load_folder", "open_folder", "read_json", "with_generation_ids"]


def load_folder(folder: Path) -> LoadedModel:
    """Load the model of a folder."""
    return open_folder(folder).load()


def open_folder(folder: Path) -> ModelFile:
    """Read the JSON files, check the headers of the weights and map them."""
    raw = read_json(folder / "config.json")
    _map_of(JsonObject(raw, folder / "config.json"))  # weights of an unknown kind are refused first
    tensors = folder_tensors(folder, raw)
    config = without_language_head(config_from_hf(raw, folder / "config.json"), raw, folder, tensors.__contains__)
    tokenizer = _tokenizer_source(folder)
    pooling = read_pooling(folder, raw, config, tokenizer)
    towers = TowerTensors(tensors)
    generation = read_json(folder / "generation_config.json") if (folder / "generation_config.json").is_file() else {}
    text = TextModel(
        path=folder,
        config=with_generation_ids(config, generation, folder / "generation_config.json"),
        tokenizer_source=tokenizer,
        generation_config=generation,
        chat_template=_chat_template(folder),
        special_tokens=_special_tokens(folder),
        pooling=pooling.config,
        vision=_vision(folder, raw) if towers.has_tower else None,
    )
    family = family_of(config)
    source: TensorSource = FolderTensors(tensors, family.hf_names.embedding.split(".")[0] + ".")
    factors = partial(family.folder_factors, config)
    tower = (lambda: None) if text.vision is None else partial(text.vision.load, towers)
    source = family.folder_source(source, config)
    return ModelFile(text, family.hf_names, source, factors, tower, partial(pooling.weights, config, family))


def folder_tensors(folder: Path, config: Mapping[str, Any] | None = None) -> FolderMap:
    """Every tensor of the folder by name, memory-mapped; a tensor of an unknown type raises on access only.

    `config` is config.json, which describes quantised weights.
    """
    new_map = _map_of(JsonObject(config or {}, folder / "config.json"))
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ModelFileError(f"{index} has no usable weight_map")
        names = sorted(set(weight_map.values()))
        if any(Path(name).name != name for name in names):
            raise ModelFileError(f"{index} names a file outside the folder")
        files = [folder / name for name in names]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelFileError(f"{folder} holds no *.safetensors file: save the model with safe_serialization=True")
    maps = []
    for file in files:
        if not file.is_file():
            raise ModelFileError(f"{file} is missing, though {index.name} names it: fetch the whole model again")
        maps.append(open_safetensors(file).tensors)
    return new_map(maps)


def _map_of(config: JsonObject) -> Callable[[list[Tensors]], FolderMap]:
    """The reader of a folder's weights; those that are quantised in an unknown way are refused."""
    found = config.object("quantization_config") or config.object("text_config").object("quantization_config")
    if not found:
        return FolderMap
    if (packing := read_packing(found)) is not None:
        return partial(IntegerMap, packing=packing)
    if (ternary := read_ternary(found)) is not None:
        return partial(TernaryMap, ternary=ternary)
    if (block := read_block(found)) is not None:
        return partial(FolderMap, block=block)
    method = " ".join(str(found.get(name)) for name in ("quant_method", "format") if found.get(name))
    raise UnsupportedModelError(
        f"the weights of this folder are quantised by {method or 'an unknown method'}, which is not supported: "
        "use the folder of the original model, or a GGUF file"
    )


class FolderTensors:
    """The tensors of a folder by name, with or without the prefix of the base model."""

    def __init__(self, tensors: Mapping[str, QuantizedTensor], prefix: str) -> None:
        self._tensors = tensors
        self._spellings = {name: name for name in tensors}
        for name in tensors:
            self._spellings.setdefault(name.replace("language_model.", "", 1).replace("text_model.", "", 1), name)
            self._spellings.setdefault(prefix + name, name)

    def has(self, name: str) -> bool:
        return name in self._spellings

    def view(self, name: str, shape: tuple[int, ...]) -> QuantizedTensor:
        if name not in self._spellings:
            raise ModelFileError(f"the tensor {name!r} is missing from the model's files: fetch the whole model again")
        tensor = self._tensors[self._spellings[name]]
        if tensor.shape != shape:
            raise ModelFileError(
                f"the tensor {name!r} has shape {tuple(tensor.shape)} where config.json implies {shape}: "
                "the files do not belong together"
            )
        return tensor


def with_generation_ids(
    config: ModelConfig, generation: Mapping[str, Any], path: Path | str = "generation_config.json"
) -> ModelConfig:
    """Add the end-of-text ids of generation_config.json to those of config.json."""
    fields, name = JsonObject(generation, path), "eos_token_id"
    eos = generation.get(name)
    ids = fields.counts(name, least=-1) if eos is None or isinstance(eos, list) else (fields.count(name, 0, least=-1),)
    return replace(config, eos_token_ids=tuple(dict.fromkeys([*config.eos_token_ids, *ids])))


def _tokenizer_source(folder: Path) -> Callable[[], Tokenizer] | None:
    """`tokenizer.json`, the vocabulary of RWKV World, or `tokenizer.model` of SentencePiece."""
    path = folder / "tokenizer_config.json"
    settings = read_json(path) if path.is_file() else {}
    if (folder / "tokenizer.json").is_file():
        return partial(Tokenizer.from_file, folder / "tokenizer.json")
    if (folder / VOCABULARY_FILE).is_file():
        return partial(read_world, folder / VOCABULARY_FILE, settings)
    if not (folder / "tokenizer.model").is_file():
        return None
    return partial(read_tokenizer, folder / "tokenizer.model", settings)


def _vision(folder: Path, raw: Mapping[str, Any]) -> Vision | None:
    """How the model takes images, from config.json and the file of its processor."""
    path = folder / "preprocessor_config.json"
    fields = read_json(path) if path.is_file() else {}
    if not fields and (folder / "processor_config.json").is_file():
        path = folder / "processor_config.json"
        inner = read_json(path).get("image_processor")
        fields = inner if isinstance(inner, dict) else {}
    return vision_of(JsonObject(raw, folder / "config.json"), fields, path)


def _chat_template(folder: Path) -> str | None:
    jinja = folder / "chat_template.jinja"
    if jinja.is_file():
        return jinja.read_text(encoding="utf-8")
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return None
    template = read_json(path).get("chat_template")
    if isinstance(template, list):  # several named templates: use the default one
        named = {str(entry.get("name")): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default") or next(iter(named.values()), None)
    return template if isinstance(template, str) else None


def _special_tokens(folder: Path) -> dict[str, str]:
    """Special tokens by their names in chat templates: bos_token, eos_token, ..."""
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return {}
    found = {}
    for name, value in read_json(path).items():
        if name.endswith("_token") and isinstance(value, str | dict):
            text = value if isinstance(value, str) else value.get("content")
            if isinstance(text, str):
                found[name] = text
    return found
