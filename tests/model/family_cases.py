"""Descriptions of real models of every family: `config.json` contents, and headers of GGUF files.

`family_configs.json` holds the `ModelConfig` that each must give, and the description that is written back for it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from family_rows import ROWS
from moe_cases import MOE_GGUF_CASES, MOE_HF_CASES

from bifolio.config import ModelConfig
from bifolio.config.layers import USUAL
from bifolio.errors import BifolioError
from bifolio.model.gguf.loader import config_from_gguf
from bifolio.model.gguf.metadata import model_metadata
from bifolio.model.gguf.reader import GgufFile, Value, open_gguf
from bifolio.model.huggingface.config import config_from_hf, config_to_hf
from bifolio.model.huggingface.folder_writer import folder_config

DEFAULTS = {field.name: None if field.default is MISSING else field.default for field in fields(ModelConfig)}
EXPECTED = Path(__file__).with_name("family_configs.json")
EXPECTED_MOE = Path(__file__).with_name("moe_configs.json")

_LLAMA = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192,
    "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-05, "hidden_act": "silu", "rope_theta": 500000.0,
    "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True, "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
}  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
_MISTRAL = {
    "model_type": "mistral", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 4, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-05, "hidden_act": "silu", "rope_theta": 10000.0, "sliding_window": 4096, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
_QWEN2 = {
    "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864,
    "num_hidden_layers": 6, "num_attention_heads": 14, "num_key_value_heads": 2, "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-06, "hidden_act": "silu", "rope_theta": 1000000.0, "sliding_window": 32768,
    "use_sliding_window": False, "max_window_layers": 3, "tie_word_embeddings": True, "bos_token_id": 151643,
    "eos_token_id": 151645,
}  # fmt: skip
_QWEN3 = {
    **_QWEN2, "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960, "attention_bias": False,
    "sliding_window": None,
}  # fmt: skip
_GEMMA3 = {
    "model_type": "gemma3_text", "vocab_size": 262144, "hidden_size": 1152, "intermediate_size": 6912,
    "num_hidden_layers": 13, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-06, "hidden_activation": "gelu_pytorch_tanh",
    "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0, "sliding_window": 512, "sliding_window_pattern": 6,
    "query_pre_attn_scalar": 256, "attention_bias": False, "final_logit_softcapping": None, "bos_token_id": 2,
    "eos_token_id": [1, 106],
}  # fmt: skip
_PHI3 = {
    "model_type": "phi3", "vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 4,
    "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 4096, "rms_norm_eps": 1e-05,
    "hidden_act": "silu", "rope_theta": 10000.0, "sliding_window": 2047, "bos_token_id": 1, "eos_token_id": 32000,
}  # fmt: skip
_GPT2 = {
    "model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024,
    "layer_norm_epsilon": 1e-05, "activation_function": "gelu_new", "bos_token_id": 50256, "eos_token_id": 50256,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
_LONG = [1.0 + i / 8 for i in range(48)]
_SHORT = [1.0 + i / 64 for i in range(48)]
_GEMMA_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}

HF_CASES: dict[str, dict[str, Any]] = {
    "gpt2": _GPT2,
    "gpt2 with a wide MLP and a head of its own": {
        **_GPT2, "n_inner": 4000, "tie_word_embeddings": False, "activation_function": "gelu", "bos_token_id": None,
    },
    "llama": {**_LLAMA, "rope_scaling": _LLAMA3},
    "llama of the first kind": {
        "model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
        "num_hidden_layers": 3, "num_attention_heads": 32, "hidden_act": "silu", "eos_token_id": 2,
    },
    "llama with biases and linear scaling": {
        **_LLAMA, "attention_bias": True, "mlp_bias": True, "rope_scaling": {"type": "linear", "factor": 4.0},
        "eos_token_id": None,
    },
    "smollm2": {
        **_LLAMA, "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": None, "max_position_embeddings": 8192,
        "rope_theta": 100000, "bos_token_id": 1, "eos_token_id": 2,
    },
    "llama in the new spelling of rope": {
        **{key: value for key, value in _LLAMA.items() if key != "rope_theta"},
        "rope_parameters": {"rope_theta": 250000.0, **_LLAMA3},
    },
    "mistral": _MISTRAL,
    "mistral without a window": {**_MISTRAL, "sliding_window": None, "head_dim": 96, "rope_theta": 1000000.0},
    "qwen2": _QWEN2,
    "qwen2 with windows in its upper layers": {**_QWEN2, "use_sliding_window": True, "sliding_window": 512},
    "qwen2 with windows by layer": {
        **_QWEN2, "use_sliding_window": True, "sliding_window": 256,
        "layer_types": ["full_attention", "sliding_attention"] * 3,
    },
    "qwen2 with yarn": {**_QWEN2, "rope_scaling": _YARN},
    "qwen3": _QWEN3,
    "qwen3 with biases and windows": {
        **_QWEN3, "attention_bias": True, "use_sliding_window": True, "sliding_window": 128,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    },
    "gemma3": _GEMMA3,
    "gemma3 of many kinds of input": {
        "model_type": "gemma3", "vision_config": {}, "text_config": {
            **_GEMMA3, "num_hidden_layers": 62, "hidden_size": 5376, "num_attention_heads": 32, "head_dim": 128,
            "num_key_value_heads": 16, "query_pre_attn_scalar": 168, "sliding_window": 1024,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "final_logit_softcapping": 30.0,
        },
    },
    "gemma3 in the new spelling of rope": {
        **{key: value for key, value in _GEMMA3.items() if not key.startswith("rope")},
        "rope_parameters": _GEMMA_ROPES, "tie_word_embeddings": False,
        "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 3 + ["sliding_attention"],
    },
    "phi3": _PHI3,
    "phi3 with a long context": {
        **_PHI3, "max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "sliding_window": 262144,
        "rope_scaling": {"type": "su", "long_factor": _LONG, "short_factor": _SHORT},
    },
    "phi3 that rotates a part of each head": {
        **_PHI3, "num_attention_heads": 24, "num_key_value_heads": 8, "partial_rotary_factor": 0.75,
        "sliding_window": None, "tie_word_embeddings": True,
    },
    **{f"{name} of its row": row.real for name, row in ROWS.items()},
}  # fmt: skip


class GgufCase(NamedTuple):
    """The header of a file, and the few tensors that say something about rope."""

    metadata: dict[str, Value]  # keys that begin with a dot are those of the architecture
    shapes: dict[str, tuple[int, ...]]
    tensors: Mapping[str, list[float]] = MappingProxyType({})


_SIZES = {".embedding_length": 64, ".block_count": 7, ".feed_forward_length": 160, ".attention.head_count": 4,
          ".attention.head_count_kv": 2, ".context_length": 4096}  # fmt: skip
_RMS = {".attention.layer_norm_rms_epsilon": 1e-6}
_TOKENS = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.eot_token_id": 9}
_EMBEDDING = {"token_embd.weight": (97, 64), **{f"filler.{i}": (1,) for i in range(80)}}
_UNTIED = {**_EMBEDDING, "output.weight": (97, 64)}
_BIASES = {f"blk.0.{name}.bias": (64,) for name in ("attn_q", "attn_output", "ffn_down")}


def _gguf(architecture: str, *entries: dict[str, Any]) -> dict[str, Value]:
    merged: dict[str, Value] = {"general.architecture": architecture}
    for part in entries:
        merged |= {architecture + key if key.startswith(".") else key: value for key, value in part.items()}
    return merged


GGUF_CASES: dict[str, GgufCase] = {
    "llama": GgufCase(_gguf("llama", _SIZES, _RMS, _TOKENS, {".rope.freq_base": 500000.0}), _UNTIED),
    "llama with factors of its frequencies": GgufCase(
        _gguf("llama", _SIZES, _RMS, {".rope.dimension_count": 16, ".vocab_size": 97}), _EMBEDDING,
        {"rope_freqs.weight": [1.0, 1.5, 2.0, 4.0, 8.0, 8.0, 8.0, 8.0]},
    ),
    "llama with a window, biases and linear scaling": GgufCase(
        _gguf("llama", _SIZES, _RMS, {".attention.sliding_window": 128, ".rope.scaling.type": "linear",
                                      ".rope.scaling.factor": 4.0, ".attention.scale": 0.2}), {**_UNTIED, **_BIASES},
    ),
    "qwen2": GgufCase(_gguf("qwen2", _SIZES, _RMS, _TOKENS), {**_EMBEDDING, "blk.0.attn_q.bias": (64,)}),
    "qwen2 with yarn": GgufCase(
        _gguf("qwen2", _SIZES, _RMS, {".rope.scaling.type": "yarn", ".rope.scaling.factor": 4.0,
                                      ".rope.scaling.original_context_length": 1024}), _UNTIED,
    ),
    "qwen3": GgufCase(
        _gguf("qwen3", _SIZES, _RMS, {".attention.key_length": 32, ".attention.value_length": 32}), _EMBEDDING
    ),
    "gemma3": GgufCase(
        _gguf("gemma3", _SIZES, _RMS, _TOKENS, {".attention.sliding_window": 512, ".rope.freq_base": 1000000.0,
                                                ".rope.scaling.type": "linear", ".rope.scaling.factor": 8.0,
                                                ".final_logit_softcapping": 30.0}), _EMBEDDING,
    ),
    "gemma3 with a pattern by layer": GgufCase(
        _gguf("gemma3", _SIZES, _RMS, {".attention.sliding_window": 8, ".rope.freq_base_swa": 20000.0,
                                       ".attention.sliding_window_pattern": np.array([True, False] * 3 + [True])}),
        _EMBEDDING,
    ),
    "gemma3 without windows": GgufCase(_gguf("gemma3", _SIZES, _RMS), _UNTIED),
    "gemma3 of 62 layers": GgufCase(
        _gguf("gemma3", {**_SIZES, ".block_count": 62}, _RMS, {".attention.sliding_window": 1024,
                                                               ".attention.key_length": 32,
                                                               ".attention.value_length": 32}), _EMBEDDING,
    ),
    "gpt2": GgufCase(
        _gguf("gpt2", {key: value for key, value in _SIZES.items() if "kv" not in key}, _TOKENS,
              {".attention.layer_norm_epsilon": 1e-5}),
        {**_EMBEDDING, **_BIASES, "blk.0.attn_qkv.bias": (192,), "position_embd.weight": (1024, 64)},
    ),
    "phi3": GgufCase(
        _gguf("phi3", _SIZES, _RMS, {".attention.sliding_window": 2047, ".rope.dimension_count": 12}), _UNTIED
    ),
    "phi3 with a long context": GgufCase(
        _gguf("phi3", _SIZES, _RMS, {".rope.scaling.original_context_length": 1024, ".rope.dimension_count": 16,
                                     ".rope.scaling.attn_factor": 1.19}), _UNTIED,
        {"rope_factors_long.weight": [float(i + 1) for i in range(8)],
         "rope_factors_short.weight": [1.0 + i / 8 for i in range(8)]},
    ),
}  # fmt: skip
HF_CASES |= MOE_HF_CASES
GGUF_CASES |= {
    name: GgufCase(_gguf(architecture, entries), shapes)
    for name, (architecture, entries, shapes) in MOE_GGUF_CASES.items()
}


def open_case(case: GgufCase, folder: Path) -> GgufFile:
    """The header as a file that the gguf package writes; tensors without values are zeros."""
    import gguf

    writer = gguf.GGUFWriter(folder / "case.gguf", str(case.metadata["general.architecture"]))
    for key, value in case.metadata.items():
        if isinstance(value, np.ndarray):
            writer.add_array(key, value.tolist())
        elif key != "general.architecture":
            add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
            add[type(value)](key, value)  # type: ignore[operator]
    for name, shape in case.shapes.items():
        writer.add_tensor(name, np.zeros(shape, np.float16))
    for name, values in case.tensors.items():
        writer.add_tensor(name, np.array(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return open_gguf(folder / "case.gguf")


def describe(config: ModelConfig) -> dict[str, Any]:
    """The fields that are not defaults, and both descriptions that are written of them, or why one cannot be."""
    layers = {name: [getattr(layer, name) for layer in config.layers] for name in USUAL}
    values = {
        **asdict(config),
        "layers": {name: own for name, own in layers.items() if set(own) != {USUAL[name]}} or (),
    }
    description = {
        "config": {key: value for key, value in values.items() if DEFAULTS[key] != value},
        "gguf": _written(lambda: model_metadata(config, 7, "name")),
        "hf": _written(lambda: config_to_hf(folder_config(config))),
    }
    found: dict[str, Any] = json.loads(json.dumps(description, default=np.ndarray.tolist))
    for rope in found["config"].get("ropes", ()):
        if rope["truncate"]:
            del rope["truncate"]
    return found


def _written(write: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return write()
    except BifolioError as error:
        return {type(error).__name__: str(error)}


def describe_all(folder: Path) -> dict[str, dict[str, Any]]:
    """Every case by the kind of its description; `python -m family_cases` writes them down."""
    return {
        "hf": {name: describe(config_from_hf(raw)) for name, raw in HF_CASES.items()},
        "gguf": {name: describe(config_from_gguf(open_case(case, folder))) for name, case in GGUF_CASES.items()},
    }


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as temporary:
        kinds = describe_all(Path(temporary))
    moe_names = {*MOE_HF_CASES, *MOE_GGUF_CASES}
    for path, is_moe in ((EXPECTED, False), (EXPECTED_MOE, True)):
        lines = [
            f'"{kind}": {{\n'
            + ",\n".join(
                f"{json.dumps(name)}: {json.dumps(case)}"
                for name, case in cases.items()
                if (name in moe_names) == is_moe
            )
            + "\n}"
            for kind, cases in kinds.items()
        ]
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n")  # a line for each case
