"""Types of projectors in llama.cpp's files: a folder's names for their tensors, its fields for their metadata."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from bifolio.errors import UnsupportedModelError
from bifolio.model.gguf.entries import Metadata
from bifolio.model.gguf.reader import GgufFile
from bifolio.quant.tensor import QuantizedTensor

GEMMA4_ROWS = 280  # of an image, in the released processors of Gemma 4
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
PIXTRAL = (
    (r"v\.patch_embd", "tower.patch_conv"),
    (r"v\.pre_ln", "tower.ln_pre"),
    (r"v\.blk\.(\d+)\.ln1", r"tower.transformer.layers.\1.attention_norm"),
    (r"v\.blk\.(\d+)\.attn_([qkv])", r"tower.transformer.layers.\1.attention.\2_proj"),
    (r"v\.blk\.(\d+)\.attn_out", r"tower.transformer.layers.\1.attention.o_proj"),
    (r"v\.blk\.(\d+)\.ln2", r"tower.transformer.layers.\1.ffn_norm"),
    (r"v\.blk\.(\d+)\.ffn_(gate|up|down)", r"tower.transformer.layers.\1.feed_forward.\2_proj"),
    (r"mm\.([12])", r"multi_modal_projector.linear_\1"),
    (r"mm\.input_norm", "multi_modal_projector.norm"),
    (r"mm\.patch_merger", "multi_modal_projector.patch_merger.merging_layer"),
)
BOUND = r"(\.(?:in|out)put_(?:min|max))"
GEMMA4 = (
    (r"v\.patch_embd", "tower.patch_embedder.input_proj"),
    (r"v\.position_embd", "tower.patch_embedder.position_embedding_table"),
    (r"v\.std_(bias|scale)", r"tower.std_\1"),
    (r"v\.blk\.(\d+)\.ln1", r"tower.encoder.layers.\1.input_layernorm"),
    (r"v\.blk\.(\d+)\.attn_post_norm", r"tower.encoder.layers.\1.post_attention_layernorm"),
    (r"v\.blk\.(\d+)\.ln2", r"tower.encoder.layers.\1.pre_feedforward_layernorm"),
    (r"v\.blk\.(\d+)\.ffn_post_norm", r"tower.encoder.layers.\1.post_feedforward_layernorm"),
    (r"v\.blk\.(\d+)\.attn_([qk])_norm", r"tower.encoder.layers.\1.self_attn.\2_norm"),
    (r"v\.blk\.(\d+)\.attn_([qkv])", r"tower.encoder.layers.\1.self_attn.\2_proj.linear"),
    (r"v\.blk\.(\d+)\.attn_out", r"tower.encoder.layers.\1.self_attn.o_proj.linear"),
    (r"v\.blk\.(\d+)\.ffn_(gate|up|down)", r"tower.encoder.layers.\1.mlp.\2_proj.linear"),
    (r"v\.blk\.(\d+)\.attn_([qkv])" + BOUND, r"tower.encoder.layers.\1.self_attn.\2_proj\3"),
    (r"v\.blk\.(\d+)\.attn_out" + BOUND, r"tower.encoder.layers.\1.self_attn.o_proj\2"),
    (r"v\.blk\.(\d+)\.ffn_(gate|up|down)" + BOUND, r"tower.encoder.layers.\1.mlp.\2_proj\3"),
    (r"mm\.input_projection", "embed_vision.embedding_projection"),
)
UNIFIED = (
    (r"v\.patch_embd", "tower.patch_dense"),
    (r"v\.patch_norm\.([12])", r"tower.patch_ln\1"),
    (r"v\.patch_norm\.3", "tower.pos_norm"),
    (r"v\.position_embd", "tower.pos_embedding"),
    (r"mm\.input_projection", "embed_vision.embedding_projection"),
)


@dataclass(frozen=True, slots=True)
class Projector:
    """One type of projector, as fields and tensors of a folder."""

    row_token: str
    names: tuple[tuple[str, str], ...]
    fields: Callable[[GgufFile, Metadata, Metadata], tuple[dict[str, Any], dict[str, Any]]]  # config and processor
    changed: Callable[[Tensors, Metadata], Tensors]


def _sizes(own: Metadata) -> dict[str, Any]:
    """Sizes that all towers have."""
    return {
        "hidden_size": own.count("clip.vision.embedding_length"),
        "intermediate_size": own.count("clip.vision.feed_forward_length"),
        "image_size": own.count("clip.vision.image_size", least=1),
        "patch_size": own.count("clip.vision.patch_size", least=1),
        "layer_norm_eps": own.number("clip.vision.attention.layer_norm_epsilon", 1e-6),
    }


def _gelu_sizes(own: Metadata) -> dict[str, Any]:
    if own.flag("clip.use_silu", False) or not own.flag("clip.use_gelu", False):
        raise UnsupportedModelError(
            f"{own.path}: a tower with another activation than GELU is not supported: pass a mmproj with clip.use_gelu"
        )
    return _sizes(own)


def _layers(own: Metadata) -> dict[str, Any]:
    counts = {"num_hidden_layers": "block_count", "num_attention_heads": "attention.head_count"}
    return {name: own.count(f"clip.vision.{key}", least=1) for name, key in counts.items()}


def _siglip(own: Metadata) -> dict[str, Any]:
    return {**_gelu_sizes(own), **_layers(own)}


def _gemma3(file: GgufFile, own: Metadata, text: Metadata) -> tuple[dict[str, Any], dict[str, Any]]:
    sizes, scale = _siglip(own), own.count("clip.vision.projector.scale_factor", 4, least=1)
    edge = sizes["image_size"]
    rows = (edge // sizes["patch_size"] // scale) ** 2
    config = {"model_type": "gemma3", "vision_config": sizes, "mm_tokens_per_image": rows}
    return config, {"size": {"height": edge, "width": edge}}


def _idefics3(file: GgufFile, own: Metadata, text: Metadata) -> tuple[dict[str, Any], dict[str, Any]]:
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


def _qwen3vl(file: GgufFile, own: Metadata, text: Metadata) -> tuple[dict[str, Any], dict[str, Any]]:
    sizes = _gelu_sizes(own)
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


def _pixtral(file: GgufFile, own: Metadata, text: Metadata) -> tuple[dict[str, Any], dict[str, Any]]:
    if "mm.patch_merger.weight" not in file.entries:
        raise UnsupportedModelError(f"{own.path}: Pixtral without mm.patch_merger is not supported: Mistral 3 has one")
    act = next((name for name in ("silu", "gelu") if own.flag(f"clip.use_{name}", False)), "quick_gelu")
    config = {
        "model_type": "mistral3",
        "vision_config": {**_sizes(own), **_layers(own), "hidden_act": act},
        "spatial_merge_size": own.count("clip.vision.spatial_merge_size", 2, least=1),
        "text_config": {"rms_norm_eps": text.number(".attention.layer_norm_rms_epsilon", 1e-5)},
    }
    return config, {"size": {"longest_edge": own.count("clip.vision.image_size", least=1)}}


def _gemma4(file: GgufFile, own: Metadata, text: Metadata) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tokens of an image see each other in the models whose layers have no inputs of their own."""
    sizes, layers = _sizes(own), _layers(own)
    heads, pool = layers["num_attention_heads"], _pool(own)
    table = file.entries.get("v.position_embd.weight")
    vision = {
        **{name: sizes[name] for name in ("hidden_size", "intermediate_size", "patch_size")},
        **layers,
        "num_key_value_heads": heads,
        "head_dim": sizes["hidden_size"] // heads,
        "pooling_kernel_size": pool,
        "position_embedding_size": 1 if table is None else table.shape[-2],
        "rms_norm_eps": sizes["layer_norm_eps"],
        "use_clipped_linears": any(name.endswith(".input_min") for name in file.entries),
        "standardize": "v.std_scale" in file.entries,
    }
    inputs = text.count(".embedding_length_per_layer_input", 0, least=0)
    of_text = {
        "hidden_size_per_layer_input": inputs,
        "pad_token_id": text.count("tokenizer.ggml.padding_token_id", 0, least=0),
        "use_bidirectional_attention": "" if inputs else "vision",
    }
    config = {"model_type": "gemma4", "vision_config": vision, "text_config": of_text}
    return config, _gemma4_images(own, sizes["patch_size"], pool)


def _gemma4_unified(file: GgufFile, own: Metadata, text: Metadata) -> tuple[dict[str, Any], dict[str, Any]]:
    width, patch, pool = own.count("clip.vision.embedding_length"), own.count("clip.vision.patch_size"), _pool(own)
    table = file.entries.get("v.position_embd.weight")
    vision = {
        "mm_embed_dim": width,
        "output_proj_dims": width,
        "mm_posemb_size": 1 if table is None else table.shape[-2],
        "patch_size": patch,
        "pooling_kernel_size": pool,
        "rms_norm_eps": own.number("clip.vision.attention.layer_norm_epsilon", 1e-6),
    }
    return {"model_type": "gemma4_unified", "vision_config": vision}, _gemma4_images(own, patch, pool)


def _pool(own: Metadata) -> int:
    return own.count("clip.vision.projector.scale_factor", 3, least=1)


def _gemma4_images(own: Metadata, patch: int, pool: int) -> dict[str, Any]:
    square = (patch * pool) ** 2
    rows = own.count("clip.vision.image_max_pixels", GEMMA4_ROWS * square, least=square) // square
    return {"max_soft_tokens": rows, "patch_size": patch, "pooling_kernel_size": pool}


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


def _pixtral_tensors(tensors: Tensors, own: Metadata) -> Tensors:
    """Rows of queries and keys in the order of a folder: halves of a head instead of pairs."""
    found, heads = dict(tensors), own.count("clip.vision.attention.head_count", least=1)
    for name, tensor in tensors.items():
        if name.endswith(("attention.q_proj.weight", "attention.k_proj.weight")) and not tensor.shape[0] % (2 * heads):
            places = np.arange(tensor.shape[0]).reshape(heads, -1, 2)
            found[name] = tensor.select_rows(np.ascontiguousarray(places.transpose(0, 2, 1)).reshape(-1))
    return found


def _gemma4_tensors(tensors: Tensors, own: Metadata) -> Tensors:
    """Values of a pixel together, tables under their name, and bounds of all products where some have bounds."""
    found = {name.replace("_table.weight", "_table"): tensor for name, tensor in tensors.items()}
    name = "tower.patch_embedder.input_proj.weight"
    if name in found and len(found[name].shape) == 4:
        patches = found[name].dequantize().transpose(0, 2, 3, 1)
        found[name] = QuantizedTensor.from_array(np.ascontiguousarray(patches).reshape(len(patches), -1))
    if not any(name.endswith(".input_min") for name in found):
        return found
    for name in [name for name in found if name.endswith("_proj.linear.weight")]:
        for side, usual in (("min", -np.inf), ("max", np.inf)):
            for place in ("input", "output"):
                key = f"{name.removesuffix('.linear.weight')}.{place}_{side}"
                value = found[key].dequantize().reshape(-1)[:1] if key in found else [usual]
                found[key] = QuantizedTensor.from_array(np.array(value, np.float32).reshape(()))
    return found


def _unified_tensors(tensors: Tensors, own: Metadata) -> Tensors:
    """Values of a pixel together, and the tables of columns and rows beside each other at each place."""
    found = dict(tensors)
    edge = own.count("clip.vision.patch_size") * _pool(own)
    order = np.arange(3 * edge**2).reshape(3, edge, edge).transpose(1, 2, 0).reshape(-1)
    for name in ("tower.patch_dense.weight", "tower.patch_ln1.weight", "tower.patch_ln1.bias"):
        if name in found and found[name].shape[-1] == len(order):
            found[name] = QuantizedTensor.from_array(np.ascontiguousarray(found[name].dequantize()[..., order]))
    tables = found.pop("tower.pos_embedding.weight", None)
    if tables is not None and len(tables.shape) == 3:
        places = np.ascontiguousarray(tables.dequantize().swapaxes(0, 1))
        found["tower.pos_embedding"] = QuantizedTensor.from_array(places)
    return found


def _place(layer: int, taps: list[int]) -> int:
    return taps.index(layer) if layer in taps else layer


PROJECTORS: Mapping[str, Projector] = {
    "gemma3": Projector("<image_soft_token>", SIGLIP, _gemma3, _gemma3_tensors),
    "gemma4v": Projector("<|image|>", GEMMA4, _gemma4, _gemma4_tensors),
    "gemma4uv": Projector("<|image|>", UNIFIED, _gemma4_unified, _unified_tensors),
    "idefics3": Projector("<image>", SIGLIP, _idefics3, _siglip_tensors),
    "pixtral": Projector("[IMG]", PIXTRAL, _pixtral, _pixtral_tensors),
    "qwen3vl_merger": Projector("<|image_pad|>", QWEN, _qwen3vl, _qwen3vl_tensors),
}
