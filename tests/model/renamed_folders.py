"""Folders of families that bring code of their own, EXAONE 3 and MiniCPM, as those of Llama and Granite."""

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


def as_granite(folder: Path) -> None:
    """MiniCPM has the tensors of Granite."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config |= {
        "model_type": "granite",
        "architectures": ["GraniteForCausalLM"],
        "embedding_multiplier": config["scale_emb"],
        "residual_multiplier": config["scale_depth"] / config["num_hidden_layers"] ** 0.5,
        "attention_multiplier": (config["hidden_size"] // config["num_attention_heads"]) ** -0.5,
        "logits_scaling": config["hidden_size"] / config["dim_model_base"],
    }
    path.write_text(json.dumps(config))


def as_known(folder: Path) -> None:
    """Change a folder of a family with code of its own into one of a class of transformers."""
    kind = json.loads((folder / "config.json").read_text())["model_type"]
    if kind == "exaone":
        as_llama(folder)
    elif kind == "minicpm":
        as_granite(folder)


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
