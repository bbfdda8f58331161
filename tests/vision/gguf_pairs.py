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
    own, images = config.vision_config, model.processor.image_processor
    images = getattr(images, "inner", images)
    layers = getattr(own, "num_hidden_layers", None) or getattr(own, "depth", 0)
    side = int(getattr(own, "num_position_embeddings", 0) ** 0.5)
    entries: dict[str, Any] = {
        gguf.Keys.Clip.PROJECTOR_TYPE: kind,
        KEYS.PROJECTION_DIM: config.text_config.hidden_size,
        KEYS.IMAGE_SIZE: side * own.patch_size if side else getattr(own, "image_size", 224),
        KEYS.PATCH_SIZE: own.patch_size,
        KEYS.EMBEDDING_LENGTH: getattr(own, "hidden_size", None) or own.mm_embed_dim,
        KEYS.FEED_FORWARD_LENGTH: getattr(own, "intermediate_size", 0),
        KEYS.BLOCK_COUNT: layers,
        KEYS.Attention.HEAD_COUNT: getattr(own, "num_attention_heads", None) or getattr(own, "num_heads", 0),
        KEYS.Attention.LAYERNORM_EPS: 1e-6,
        KEYS.IMAGE_MEAN: list(map(float, images.image_mean)),
        KEYS.IMAGE_STD: list(map(float, images.image_std)),
        KEYS.USE_GELU: True,
        "clip.has_vision_encoder": True,
        **changes,
    }
    writer = gguf.GGUFWriter(path, "clip")
    for key, value in entries.items():
        add_entry(writer, key, value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, max(layers, 3))  # blocks and projections
    with torch.no_grad():
        for name, tensor in model.model.state_dict().items():
            if not any(part in name for part in ("vision", "visual", "connector", "multi_modal")):
                continue
            values = np.atleast_1d(tensor.float().numpy())
            for stored, array in stored_tensors(name.removeprefix("model."), values, own, names):
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


def kind_of(own: Any) -> str:
    return str(own.model_type).removesuffix("_vision")


def unified_name(name: str) -> str:
    """Under the names of llama.cpp, which releases of the package lack."""
    for part, stored in (
        ("pos_embedding", "v.position_embd.weight"), ("pos_norm.", "v.patch_norm.3."), ("patch_ln", "v.patch_norm."),
        ("patch_dense.", "v.patch_embd."), ("embedding_projection.", "mm.input_projection."),
    ):  # fmt: skip
        if part in name:
            return stored + ("" if part == "pos_embedding" else name.partition(part)[2])
    raise KeyError(name)


def unified_values(name: str, array: np.ndarray, edge: int) -> np.ndarray:
    """Values of a patch channel by channel, and one table of positions after the other."""
    if name.endswith("pos_embedding"):
        return array.swapaxes(0, 1)
    if "patch_dense.weight" in name or "patch_ln1." in name:
        pixels = array.reshape(*array.shape[:-1], edge, edge, 3)
        return np.moveaxis(pixels, -1, -3).reshape(array.shape)
    return array


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
    if kind_of(own) == "pixtral" and name.endswith(("q_proj.weight", "k_proj.weight")):
        heads = array.reshape(own.num_attention_heads, 2, -1, array.shape[1])
        array = heads.swapaxes(1, 2).reshape(array.shape)
    if kind_of(own) == "gemma4":
        name = name.replace("vision_tower.encoder.", "vision_model.model.").replace(".linear.weight", ".weight")
        name += ".weight" if name.endswith("position_embedding_table") else ""
        if name.endswith("patch_embedder.input_proj.weight"):
            array = array.reshape(len(array), own.patch_size, own.patch_size, 3).transpose(0, 3, 1, 2)
    if kind_of(own) == "gemma4_unified":
        return [(unified_name(name), unified_values(name, array, own.patch_size * own.pooling_kernel_size))]
    suffixes = (".weight", ".bias", ".input_max", ".input_min", ".output_max", ".output_min")
    for prefix in ("", "model.", "model.vision_tower.", "vision_tower."):
        for spelled in (name, name.replace("vision_tower.", "vision_tower.vision_model.", 1)):
            found = names.get_name(prefix + spelled, try_suffixes=suffixes)
            if found is not None:
                return [(found, array)]
    raise KeyError(name)
