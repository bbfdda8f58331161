"""GGUF pairs of the small models that read images: the text by our writer, the tower by the package `gguf`.

The `gguf` package maps the names of transformers to those of llama.cpp; its writer stores them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np

from bifolio.model.gguf.writer import write_gguf
from bifolio.model.loader import load_model
from bifolio.quant.formats import QuantFormat

if TYPE_CHECKING:
    from vision_models import VisionModel

KEYS = gguf.Keys.ClipVision


def write_text(model: VisionModel, path: Path, architecture: str | None = None, **entries: Any) -> None:
    """The text part; under another architecture its entries keep their values, and `entries` are added."""
    plain = path if architecture is None else path.with_suffix(".plain")
    write_gguf(plain, load_model(model.folder), QuantFormat.F32)
    if architecture is None:
        return
    reader = gguf.GGUFReader(plain)
    old = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(path, architecture)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        kind = field.types[0]
        sub_type = field.types[-1] if kind is gguf.GGUFValueType.ARRAY else None
        name = architecture + field.name.removeprefix(old) if field.name.startswith(f"{old}.") else field.name
        writer.add_key_value(name, field.contents(), kind, sub_type)
    for name, value in entries.items():
        writer.add_array(f"{architecture}.{name}", value) if isinstance(value, list) else writer.add_uint32(
            f"{architecture}.{name}", value
        )
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    finish(writer)
    plain.unlink()


def finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_tower(model: VisionModel, path: Path, kind: str, dtype: type = np.float32, **changes: Any) -> None:
    """The mmproj file of a model: `kind` is the type of its projector. `changes` replace or add entries."""
    import torch

    config = model.model.config
    own, values = config.vision_config, model.processor.image_processor
    layers = getattr(own, "num_hidden_layers", None) or own.depth
    side = int(getattr(own, "num_position_embeddings", 0) ** 0.5)
    entries: dict[str, Any] = {
        gguf.Keys.Clip.PROJECTOR_TYPE: kind,
        KEYS.PROJECTION_DIM: config.text_config.hidden_size,
        KEYS.IMAGE_SIZE: side * own.patch_size if side else own.image_size,
        KEYS.PATCH_SIZE: own.patch_size,
        KEYS.EMBEDDING_LENGTH: own.hidden_size,
        KEYS.FEED_FORWARD_LENGTH: own.intermediate_size,
        KEYS.BLOCK_COUNT: layers,
        KEYS.Attention.HEAD_COUNT: getattr(own, "num_attention_heads", None) or own.num_heads,
        KEYS.Attention.LAYERNORM_EPS: 1e-6,
        KEYS.IMAGE_MEAN: list(map(float, values.image_mean)),
        KEYS.IMAGE_STD: list(map(float, values.image_std)),
        KEYS.USE_GELU: True,
        "clip.has_vision_encoder": True,
        **changes,
    }
    writer = gguf.GGUFWriter(path, "clip")
    for key, value in entries.items():
        add_entry(writer, key, value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, layers)
    with torch.no_grad():
        for name, tensor in model.model.state_dict().items():
            if not any(part in name for part in ("vision", "visual", "connector", "multi_modal")):
                continue
            for stored, array in stored_tensors(name.removeprefix("model."), tensor.float().numpy(), own, names):
                matrix = array.ndim > 1 and "embd" not in stored
                writer.add_tensor(stored, np.ascontiguousarray(array.astype(dtype if matrix else np.float32)))
    finish(writer)


def add_entry(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    else:
        writer.add_uint32(key, value)


def stored_tensors(name: str, array: np.ndarray, own: Any, names: Any) -> list[tuple[str, np.ndarray]]:
    """A tensor of transformers under the names of llama.cpp, as its converter changes it."""
    name = name.replace("mm_input_projection_weight", "mm_input_projection.weight")
    if "soft_emb_norm" in name:
        array = array + 1
    if name == "visual.patch_embed.proj.weight":
        return [("v.patch_embd.weight", array[:, :, 0]), ("v.patch_embd.weight.1", array[:, :, 1])]
    if name.startswith("visual.deepstack_merger_list."):
        number, part, ending = name.split(".")[2:]
        layer = own.deepstack_visual_indexes[int(number)]
        short = {"norm": "norm", "linear_fc1": "fc1", "linear_fc2": "fc2"}[part]
        return [(f"v.deepstack.{layer}.{short}.{ending}", array)]
    if name.startswith("visual.merger."):
        part, ending = name.split(".")[2:]
        return [({"norm": "v.post_ln", "linear_fc1": "mm.0", "linear_fc2": "mm.2"}[part] + f".{ending}", array)]
    for prefix in ("", "model.", "model.vision_tower.", "vision_tower."):
        for spelled in (name, name.replace("vision_tower.", "vision_tower.vision_model.", 1)):
            found = names.get_name(prefix + spelled, try_suffixes=(".weight", ".bias"))
            if found is not None:
                return [(found, array)]
    raise KeyError(name)
