"""The towers of GGUF models: a second file beside the text model, `mmproj`, in llama.cpp's names.

Its metadata becomes the fields that a folder would have, and its tensors get the names of a folder, so that each family
of towers is read in one way (`model.vision.families`). Missing entries have the values of the released models.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bifolio.errors import BifolioError, ModelFileError, UnsupportedModelError
from bifolio.model.gguf.entries import Metadata
from bifolio.model.gguf.reader import GgufFile, open_gguf
from bifolio.model.huggingface.json_object import JsonObject
from bifolio.model.model_file import ModelFile
from bifolio.model.vision.families import vision_of
from bifolio.model.vision.tensors import TowerTensors
from bifolio.model.vision.tower import Vision
from bifolio.quant.tensor import QuantizedTensor

ARCHITECTURE = "clip"
QWEN_PIXELS = {"shortest_edge": 65536, "longest_edge": 16777216}  # of the released processors of Qwen3-VL
Tensors = dict[str, QuantizedTensor]

SIGLIP = (
    (r"v\.patch_embd", "tower.embeddings.patch_embedding"),
    (r"v\.position_embd", "tower.embeddings.position_embedding"),
    (r"v\.post_ln", "tower.post_layernorm"),
    (r"v\.blk\.(\d+)\.ln([12])", r"tower.encoder.layers.\1.layer_norm\2"),
    (r"v\.blk\.(\d+)\.attn_([qkv])", r"tower.encoder.layers.\1.self_attn.\2_proj"),
    (r"v\.blk\.(\d+)\.attn_out", r"tower.encoder.layers.\1.self_attn.out_proj"),
    (r"v\.blk\.(\d+)\.ffn_up", r"tower.encoder.layers.\1.mlp.fc1"),
    (r"v\.blk\.(\d+)\.ffn_down", r"tower.encoder.layers.\1.mlp.fc2"),
    (r"mm\.soft_emb_norm", "multi_modal_projector.mm_soft_emb_norm"),
    (r"mm\.model\.fc", "connector.modality_projection.proj"),
)
QWEN = (
    (r"v\.patch_embd", "tower.patch_embed.proj"),
    (r"v\.position_embd", "tower.pos_embed"),
    (r"v\.post_ln", "tower.merger.norm"),
    (r"mm\.0", "tower.merger.linear_fc1"),
    (r"mm\.2", "tower.merger.linear_fc2"),
    (r"v\.blk\.(\d+)\.ln([12])", r"tower.blocks.\1.norm\2"),
    (r"v\.blk\.(\d+)\.attn_qkv", r"tower.blocks.\1.attn.qkv"),
    (r"v\.blk\.(\d+)\.attn_out", r"tower.blocks.\1.attn.proj"),
    (r"v\.blk\.(\d+)\.ffn_up", r"tower.blocks.\1.mlp.linear_fc1"),
    (r"v\.blk\.(\d+)\.ffn_down", r"tower.blocks.\1.mlp.linear_fc2"),
    (r"v\.deepstack\.(\d+)\.norm", r"tower.deepstack_merger_list.\1.norm"),
    (r"v\.deepstack\.(\d+)\.fc([12])", r"tower.deepstack_merger_list.\1.linear_fc\2"),
)


@dataclass(frozen=True, slots=True)
class Projector:
    """One type of projector, as fields and tensors of a folder."""

    row_token: str
    names: tuple[tuple[str, str], ...]
    fields: Callable[[Metadata, Metadata], tuple[dict[str, Any], dict[str, Any]]]  # of config.json and the processor
    changed: Callable[[Tensors, Metadata], Tensors]


def is_projector(file: GgufFile) -> bool:
    """Whether a file holds a tower instead of a model."""
    return bool(file.metadata.get("general.architecture") == ARCHITECTURE)


def read_projector(file: GgufFile, text: ModelFile, metadata: Metadata) -> tuple[Vision, TowerTensors]:
    """How a text model takes images with this projector, and the tensors of the tower."""
    own = Metadata(file.metadata, file.path)
    if not is_projector(file):
        raise ModelFileError(f"{file.path} holds no projector but a model of type {own.architecture}: pass its mmproj")
    key = next((key for key in ("clip.vision.projector_type", "clip.projector_type") if own.has(key)), None)
    kind = own.text(key or "clip.projector_type")
    if kind not in PROJECTORS:
        raise UnsupportedModelError(
            f"{file.path}: projectors of type {kind!r} are not supported: {', '.join(PROJECTORS)} are"
        )
    projector, size = PROJECTORS[kind], text.text.config.hidden_size
    if own.count("clip.vision.projection_dim") != size:
        raise ModelFileError(
            f"{file.path} makes rows of {own.count('clip.vision.projection_dim')} numbers and {text.text.path.name} "
            f"takes {size}: the files belong to different models"
        )
    config, processor = projector.fields(own, metadata)
    config |= {"image_token_id": _token(projector.row_token, metadata, file.path)}
    config["text_config"] = {**config.get("text_config", {}), "hidden_size": size}
    processor |= {"image_mean": _floats(own, "image_mean"), "image_std": _floats(own, "image_std")}
    vision = vision_of(JsonObject(config, file.path), processor, file.path)
    if vision is None:
        raise UnsupportedModelError(f"{file.path}: the tower of a {kind} projector is not known")
    return vision, TowerTensors(projector.changed(dict(_renamed(file, projector.names)), own))


def with_projector(opened: ModelFile, metadata: Metadata, path: Path) -> ModelFile:
    """A text model with the tower of a projector's file."""
    vision, tensors = read_projector(open_gguf(path), opened, metadata)
    return replace(opened, text=replace(opened.text, vision=vision), tower=partial(vision.load, tensors))


def projector_beside(opened: ModelFile, metadata: Metadata) -> Path | None:
    """The projector in the folder of a text model: of those that fit it, the one with the most similar name."""
    path = opened.text.path
    fitting = []
    for each in sorted(path.parent.glob("*mmproj*.gguf")):
        try:
            read_projector(open_gguf(each), opened, metadata)
        except BifolioError:  # of another model beside this one
            continue
        fitting.append(each)

    def likeness(found: Path) -> int:
        pairs = zip(re.sub(r"mmproj-?", "", found.name), path.name, strict=False)
        return next((count for count, (one, other) in enumerate(pairs) if one != other), len(path.name))

    return max(fitting, key=likeness, default=None)


def _token(text: str, metadata: Metadata, path: Path) -> int:
    tokens = metadata.strings("tokenizer.ggml.tokens") or ()
    found = next((number for number, token in enumerate(tokens) if token == text), None)
    if found is None:
        raise ModelFileError(f"{path} needs the token {text!r}, which {metadata.path.name} lacks: pass its own mmproj")
    return found


def _floats(own: Metadata, name: str) -> list[float]:
    values = own.array(f"clip.vision.{name}")
    return [0.5] * 3 if values is None else [float(value) for value in values]


def _renamed(file: GgufFile, names: tuple[tuple[str, str], ...]) -> Iterator[tuple[str, QuantizedTensor]]:
    patterns = [(re.compile(pattern), name) for pattern, name in names]
    for entry in file.entries.values():
        if not entry.format.is_readable:
            raise UnsupportedModelError(f"{file.path}: the tensor {entry.name!r} has type {entry.format.name}")
        stem, dot, ending = entry.name.partition(".weight")
        if not dot:
            stem, dot, ending = entry.name.partition(".bias")
        found = next((match.expand(name) for p, name in patterns if (match := p.fullmatch(stem)) is not None), stem)
        yield found + dot + ending, file.tensor(entry.name)


def _sizes(own: Metadata) -> dict[str, Any]:
    """Sizes that all towers have."""
    if own.flag("clip.use_silu", False) or not own.flag("clip.use_gelu", False):
        raise UnsupportedModelError(
            f"{own.path}: a tower with another activation than GELU is not supported: pass a mmproj with clip.use_gelu"
        )
    return {
        "hidden_size": own.count("clip.vision.embedding_length"),
        "intermediate_size": own.count("clip.vision.feed_forward_length"),
        "image_size": own.count("clip.vision.image_size", least=1),
        "patch_size": own.count("clip.vision.patch_size", least=1),
        "layer_norm_eps": own.number("clip.vision.attention.layer_norm_epsilon", 1e-6),
    }


def _siglip(own: Metadata) -> dict[str, Any]:
    counts = {"num_hidden_layers": "block_count", "num_attention_heads": "attention.head_count"}
    return {**_sizes(own), **{name: own.count(f"clip.vision.{key}") for name, key in counts.items()}}


def _gemma3(own: Metadata, text: Metadata) -> tuple[dict[str, Any], dict[str, Any]]:
    sizes, scale = _siglip(own), own.count("clip.vision.projector.scale_factor", 4, least=1)
    edge = sizes["image_size"]
    rows = (edge // sizes["patch_size"] // scale) ** 2
    config = {"model_type": "gemma3", "vision_config": sizes, "mm_tokens_per_image": rows}
    return config, {"size": {"height": edge, "width": edge}}


def _idefics3(own: Metadata, text: Metadata) -> tuple[dict[str, Any], dict[str, Any]]:
    sizes = _siglip(own)
    edge = sizes["image_size"]
    longest = own.count("clip.vision.preproc_image_size", edge, least=1)
    scale = own.count("clip.vision.projector.scale_factor", 2, least=1)
    processor = {
        "size": {"longest_edge": longest},
        "max_image_size": {"longest_edge": edge},
        "do_image_splitting": longest > edge,
    }
    return {"model_type": "idefics3", "vision_config": sizes, "scale_factor": scale}, processor


def _qwen3vl(own: Metadata, text: Metadata) -> tuple[dict[str, Any], dict[str, Any]]:
    sizes = _sizes(own)
    side = sizes["image_size"] // sizes["patch_size"]
    vision = {
        **{name: sizes[name] for name in ("hidden_size", "intermediate_size", "patch_size")},
        "depth": own.count("clip.vision.block_count"),
        "num_heads": own.count("clip.vision.attention.head_count", least=1),
        "spatial_merge_size": own.count("clip.vision.spatial_merge_size", 2, least=1),
        "out_hidden_size": own.count("clip.vision.projection_dim"),
        "num_position_embeddings": side * side,
        "deepstack_visual_indexes": _taps(own),
    }
    sections = text.array(".rope.dimension_sections")
    rope = {} if sections is None else {"mrope_section": [int(count) for count in sections[:3]]}
    size = {
        name: own.count(f"clip.vision.image_{which}_pixels", QWEN_PIXELS[name])
        for name, which in (("shortest_edge", "min"), ("longest_edge", "max"))
    }
    config = {"model_type": "qwen3_vl", "vision_config": vision, "text_config": {"rope_parameters": rope}}
    return config, {"size": size}


def _taps(own: Metadata) -> list[int]:
    """The layers whose features are added to the text network, in order."""
    flags = own.array("clip.vision.is_deepstack_layers")
    return [] if flags is None else np.flatnonzero(flags).tolist()


def _siglip_tensors(tensors: Tensors, own: Metadata) -> Tensors:
    """Matrices of an MLP by their shapes: some files name them the other way round."""
    found, inner = dict(tensors), own.count("clip.vision.feed_forward_length")
    for name, tensor in tensors.items():
        if name.endswith("mlp.fc1.weight") and tensor.shape[0] != inner:
            first, second = name.removesuffix(".weight"), name.removesuffix("fc1.weight") + "fc2"
            for part in (".weight", ".bias"):
                if first + part in tensors and second + part in tensors:
                    found[first + part], found[second + part] = tensors[second + part], tensors[first + part]
    return found


def _gemma3_tensors(tensors: Tensors, own: Metadata) -> Tensors:
    """The norm as a folder stores it, without its offset."""
    found = _siglip_tensors(tensors, own)
    norm, projection = "multi_modal_projector.mm_soft_emb_norm.weight", "mm.input_projection.weight"
    if norm in found:
        found[norm] = QuantizedTensor.from_array(found[norm].dequantize() - np.float32(1))
    if projection in found:
        found["multi_modal_projector.mm_input_projection_weight"] = found.pop(projection)
    return found


def _qwen3vl_tensors(tensors: Tensors, own: Metadata) -> Tensors:
    """Patches of both frames as one tensor, and mergers by their order instead of their layers."""
    taps = _taps(own)

    def ordered(name: str) -> str:
        return re.sub(r"(?<=deepstack_merger_list\.)\d+", lambda match: str(_place(int(match[0]), taps)), name)

    found = {ordered(name): tensor for name, tensor in tensors.items()}
    name = "tower.patch_embed.proj.weight"
    frames = [found.pop(key) for key in (name, f"{name}.1") if key in found]
    if frames and len({frame.shape for frame in frames}) == 1:
        found[name] = QuantizedTensor.from_array(np.stack([frame.dequantize() for frame in frames], axis=2))
    return found


def _place(layer: int, taps: list[int]) -> int:
    return taps.index(layer) if layer in taps else layer


PROJECTORS: Mapping[str, Projector] = {
    "gemma3": Projector("<image_soft_token>", SIGLIP, _gemma3, _gemma3_tensors),
    "idefics3": Projector("<image>", SIGLIP, _idefics3, _siglip_tensors),
    "qwen3vl_merger": Projector("<|image_pad|>", QWEN, _qwen3vl, _qwen3vl_tensors),
}
