"""Folders of EXAONE 3, which brings code of its own, from folders of Llama, and the reverse."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.numpy import load_file, save_file

TENSORS = {
    "model.embed_tokens.": "transformer.wte.",
    "model.norm.": "transformer.ln_f.",
    "model.layers.": "transformer.h.",
    ".input_layernorm.": ".ln_1.",
    ".post_attention_layernorm.": ".ln_2.",
    ".self_attn.o_proj.": ".attn.attention.out_proj.",
    ".self_attn.": ".attn.attention.",
    ".mlp.gate_proj.": ".mlp.c_fc_0.",
    ".mlp.up_proj.": ".mlp.c_fc_1.",
    ".mlp.down_proj.": ".mlp.c_proj.",
}
FIELDS = {"num_hidden_layers": "num_layers", "rms_norm_eps": "layer_norm_epsilon", "hidden_act": "activation_function"}


def as_exaone(folder: Path) -> None:
    """Rename the tensors and the fields of a folder of Llama."""
    _renamed(folder, TENSORS, FIELDS, {"model_type": "exaone", "architectures": ["ExaoneForCausalLM"]})


def as_llama(folder: Path) -> None:
    tensors = {theirs: ours for ours, theirs in TENSORS.items()}
    fields = {theirs: ours for ours, theirs in FIELDS.items()}
    _renamed(folder, tensors, fields, {"model_type": "llama", "architectures": ["LlamaForCausalLM"]})


def is_exaone(folder: Path) -> bool:
    return bool(json.loads((folder / "config.json").read_text())["model_type"] == "exaone")


def _renamed(folder: Path, tensors: dict[str, str], fields: dict[str, str], changed: dict[str, object]) -> None:
    config = json.loads((folder / "config.json").read_text())
    config = {fields.get(key, key): value for key, value in config.items()} | changed
    (folder / "config.json").write_text(json.dumps(config))
    path = folder / "model.safetensors"
    found = {}
    for name, values in load_file(path).items():
        for old, new in tensors.items():
            name = name.replace(old, new)
        found[name] = values
    save_file(found, path, {"format": "pt"})
