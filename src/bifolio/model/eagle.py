"""Folders of EAGLE-3 heads, in the published layout: reading and writing.

config.json         LlamaForCausalLMEagle3: one layer of Llama, `draft_vocab_size`, the layers that the head reads
model.safetensors   fc, midlayer.*, norm, lm_head, d2t, t2d; embed_tokens unless it is the target's
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from bifolio.config import ModelConfig
from bifolio.errors import ConfigError, ModelFileError, UnsupportedModelError
from bifolio.kernels.interface import Linear, Norm
from bifolio.model.draft_head import HeadWeights, LoadedHead, default_taps, rounded_like, split_columns
from bifolio.model.file_access import atomic_write
from bifolio.model.huggingface.config import config_from_hf, config_to_hf
from bifolio.model.huggingface.hf_loader import folder_tensors, read_json
from bifolio.model.huggingface.json_object import JsonObject
from bifolio.model.huggingface.safetensors_file import write_safetensors
from bifolio.model.loaded import LoadedModel
from bifolio.model.weights import LayerWeights, attention_shape, inverse_frequencies
from bifolio.quant.tensor import QuantizedTensor

ARCHITECTURE = "LlamaForCausalLMEagle3"
PREFIXES = ("", "model.")  # of all tensors
LAYERS = ("midlayer.", "layers.0.")  # names of the layer
NUM_TAPS = 3


def is_eagle_folder(path: Path) -> bool:
    config = path / "config.json"
    return config.is_file() and ARCHITECTURE in JsonObject(read_json(config), config).texts("architectures")


def load_eagle(path: str | Path, target: LoadedModel) -> LoadedHead:
    """Read the head in a folder and check that it belongs to a model like `target`."""
    folder = Path(path)
    if not folder.is_dir():
        raise ModelFileError(
            f"{folder} is not a folder: an EAGLE-3 head is a folder with config.json and *.safetensors"
        )
    raw = read_json(folder / "config.json")
    fields = JsonObject(raw, folder / "config.json")
    if ARCHITECTURE not in fields.texts("architectures"):
        raise UnsupportedModelError(
            f"{folder} is no EAGLE-3 head: the architectures of its config.json must contain {ARCHITECTURE!r}"
        )
    config = config_from_hf({**raw, "model_type": "llama"}, folder / "config.json")
    if config.num_layers != 1:
        raise UnsupportedModelError(f"{folder}: a head of {config.num_layers} layers is not supported; one layer is")
    if not list(folder.glob("*.safetensors")):
        raise ModelFileError(f"{folder} has no *.safetensors file: convert pytorch_model.bin with safetensors first")
    tensors = HeadTensors(folder, folder_tensors(folder, raw))
    size = fields.count("target_hidden_size", config.hidden_size)
    if config.vocab_size != target.config.vocab_size or size != target.config.hidden_size:
        raise ConfigError(
            f"the head in {folder} is for a model with {config.vocab_size} tokens and a width of {size}, and the model "
            f"has {target.config.vocab_size} and {target.config.hidden_size}: use a head trained for this model"
        )
    return LoadedHead(folder, rounded_like(_weights(fields, config, tensors, target), target.weights))


class HeadTensors:
    """The tensors of a head's folder under any of their published names."""

    def __init__(self, folder: Path, tensors: Mapping[str, QuantizedTensor]) -> None:
        self._folder, self._tensors = folder, tensors

    def find(self, name: str) -> QuantizedTensor | None:
        spellings = (
            [name] if not name.startswith(LAYERS[0]) else [name.replace(LAYERS[0], layer, 1) for layer in LAYERS]
        )
        for spelling in (prefix + each for prefix in PREFIXES for each in spellings):
            if spelling in self._tensors:
                return self._tensors[spelling]
        return None

    def get(self, name: str, *shape: int) -> QuantizedTensor:
        tensor = self.find(name)
        if tensor is None:
            raise ModelFileError(f"{self._folder}: the tensor {name!r} is missing: fetch the whole head again")
        if tensor.shape != shape:
            raise ModelFileError(
                f"{self._folder}: the tensor {name!r} has shape {tensor.shape} where config.json implies {shape}"
            )
        return tensor

    def linear(self, name: str, rows: int, columns: int) -> Linear:
        return Linear((self.get(f"{name}.weight", rows, columns),), (None,))

    def norm(self, name: str, config: ModelConfig) -> Norm:
        return Norm(self.get(f"{name}.weight", config.hidden_size).dequantize(), None, config.norm_eps)


def _weights(fields: JsonObject, config: ModelConfig, tensors: HeadTensors, target: LoadedModel) -> HeadWeights:
    d, size = config.hidden_size, target.config.hidden_size
    embedding = tensors.find("embed_tokens.weight")
    if embedding is None and d != size:
        raise ModelFileError(f"a head of width {d} for a model of width {size} needs embed_tokens of its own")
    token_ids, draft_vocab = _token_ids(fields, config, tensors)
    token_part, hidden_part = _split_qkv(config, tensors)
    ropes = [inverse_frequencies(rope, config.max_position) for rope in config.ropes]
    return HeadWeights(
        config=config,
        kind="eagle",
        taps=_taps(fields, target.config.num_layers),
        state_size=size,
        state_scale=target.config.residual_scale,
        merge=tensors.linear("fc", d, NUM_TAPS * size),
        state_norm=None,
        embedding=embedding,
        token_norm=tensors.norm("midlayer.input_layernorm", config),
        hidden_norm=tensors.norm("midlayer.hidden_norm", config),
        token_part=token_part,
        hidden_part=hidden_part,
        layer=_layer(config, tensors),
        final_norm=tensors.norm("norm", config),
        head=tensors.linear("lm_head", draft_vocab, d),
        inverse_frequencies=tuple(frequencies for frequencies, _ in ropes),
        rope_scales=tuple(scale for _, scale in ropes),
        token_ids=token_ids,
        norms_residual=fields.flag("norm_before_residual", False),
    )


def _split_qkv(config: ModelConfig, tensors: HeadTensors) -> tuple[Linear, Linear]:
    """The products of queries, keys and values with the token and with the hidden state; biases go with the first."""
    d = config.hidden_size
    sizes = {"q": config.query_size, "k": config.kv_size, "v": config.kv_size}
    names = {part: f"midlayer.self_attn.{part}_proj" for part in sizes}
    halves = [split_columns(tensors.get(f"{names[p]}.weight", size, 2 * d), d) for p, size in sizes.items()]
    biases = tuple(
        tensors.get(f"{names[part]}.bias", size).dequantize() if config.qkv_bias else None
        for part, size in sizes.items()
    )
    return Linear(tuple(half[0] for half in halves), biases), Linear(tuple(half[1] for half in halves), (None,) * 3)


def _layer(config: ModelConfig, tensors: HeadTensors) -> LayerWeights:
    d, ffn = config.hidden_size, config.intermediate_size
    gate, up = (tensors.get(f"midlayer.mlp.{name}_proj.weight", ffn, d) for name in ("gate", "up"))
    bias = tensors.find("midlayer.self_attn.o_proj.bias") if config.output_bias else None
    output = tensors.linear("midlayer.self_attn.o_proj", d, config.query_size)
    return LayerWeights(
        shape=attention_shape(config, 0),
        attention_norm=None,
        qkv=Linear((), ()),
        output=output if bias is None else replace(output, biases=(bias.dequantize(),)),
        post_attention_norm=None,
        mlp_norm=tensors.norm("midlayer.post_attention_layernorm", config),
        up=Linear((gate, up), (None, None)),
        down=tensors.linear("midlayer.mlp.down_proj", d, ffn),
        post_mlp_norm=None,
        rope=0,
    )


def _taps(fields: JsonObject, num_layers: int) -> tuple[int, ...]:
    """Numbers of layers before each state. Nested ids count layers from 0, those of the top level count states."""
    name = "eagle_aux_hidden_state_layer_ids"
    nested = fields.object("eagle_config").counts(name, least=-1)
    top = fields.counts(name, least=0)
    taps = tuple(i + 1 for i in nested) if nested else top or default_taps(num_layers)
    if len(taps) != NUM_TAPS or not all(0 <= tap <= num_layers for tap in taps):
        raise ModelFileError(
            f"an EAGLE-3 head reads {NUM_TAPS} of the model's {num_layers} layers, not {list(taps)}: "
            "use a head that was trained for this model"
        )
    return taps


def _token_ids(fields: JsonObject, config: ModelConfig, tensors: HeadTensors) -> tuple[np.ndarray | None, int]:
    """The target's ids of the head's tokens (d2t holds differences), and their number."""
    count = fields.count("draft_vocab_size", config.vocab_size)
    if tensors.find("d2t") is None:
        if count != config.vocab_size:
            raise ModelFileError(
                f"the head has {count} of {config.vocab_size} tokens and no tensor d2t that names them"
            )
        return None, count
    differences = tensors.get("d2t", count)
    ids = np.arange(count) + np.ascontiguousarray(differences.data).view(np.int64).reshape(-1)
    if len(np.unique(ids)) != count or ids.min() < 0 or ids.max() >= config.vocab_size:
        raise ModelFileError("the head's tensor d2t does not name different tokens of the vocabulary")
    return (None, count) if np.array_equal(ids, np.arange(config.vocab_size)) else (ids, count)


def write_eagle(
    folder: Path, config: ModelConfig, taps: Sequence[int], token_ids: np.ndarray, tensors: Mapping[str, np.ndarray]
) -> None:
    """Write a head: `tensors` by their published names, without d2t and t2d, which follow from `token_ids`."""
    folder.mkdir(parents=True, exist_ok=True)
    known = np.zeros(config.vocab_size, np.bool_)
    known[token_ids] = True
    named = {**tensors, "d2t": token_ids - np.arange(len(token_ids)), "t2d": known}
    write_safetensors(folder / "model.safetensors", named, {"format": "pt"})
    layers = {"eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in taps], "use_aux_hidden_state": True}
    fields = config_to_hf(config, "float16") | {
        "architectures": [ARCHITECTURE],
        "draft_vocab_size": len(token_ids),
        "target_hidden_size": config.hidden_size,
        "eagle_config": layers,
    }
    with atomic_write(folder / "config.json") as file:
        file.write(json.dumps(fields, indent=2).encode())
