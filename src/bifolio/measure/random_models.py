"""Models of well-known shapes with random weights in memory: benchmarks need no file."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np

from bifolio.config import ModelConfig, RecurrentConfig, RopeConfig, layers_of
from bifolio.errors import ConfigError
from bifolio.model.families import family_of
from bifolio.model.loaded import LoadedModel
from bifolio.model.tensor_names import assemble
from bifolio.quant.formats import QuantFormat
from bifolio.quant.tensor import QuantizedTensor

DISTINCT_VALUES = 1 << 20  # random values per matrix; larger matrices repeat them


def _llama(  # the values of a config.json, in the usual order
    vocab: int, hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, context: int, theta: float
) -> ModelConfig:
    return ModelConfig(
        architecture="llama",
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hidden // heads,
        intermediate_size=ffn,
        max_position=context,
        tie_embeddings=True,
        ropes=(RopeConfig(theta, hidden // heads),),
    )


def _hybrid(base: ModelConfig, layers: int, heads: int, groups: int, size: int) -> ModelConfig:
    """Qwen3.5: attention in every fourth layer, gated delta nets in the others."""
    attends = [layer % 4 == 3 for layer in range(layers)]
    recurrent = RecurrentConfig(
        "delta",
        width=4,
        channels=(heads + 2 * groups) * size,
        heads=heads,
        groups=groups,
        key_size=size,
        value_size=size,
    )
    rope = replace(base.ropes[0], rotary_dim=base.head_dim // 4)
    return replace(
        base, architecture="qwen35", num_layers=layers, ropes=(rope,), qk_norm=True, norm_offset=1.0,
        attention_gate=True, recurrent=recurrent,
        layers=layers_of(layers, attention=attends, recurrent=[not has for has in attends]),
    )  # fmt: skip


SHAPES = {
    "tiny": _llama(512, 64, 2, 4, 2, 192, 8192, 1e4),
    "S": _llama(49152, 576, 30, 9, 3, 1536, 8192, 1e5),  # SmolLM2-135M
    "M": _llama(128256, 2048, 16, 32, 8, 8192, 131072, 5e5),  # Llama-3.2-1B
    "hybrid-tiny": _hybrid(_llama(512, 64, 4, 4, 2, 192, 8192, 1e4), 4, 4, 2, 16),
    "hybrid-S": _hybrid(_llama(49152, 768, 16, 6, 2, 2304, 32768, 1e7), 16, 12, 6, 64),  # Qwen3.5-4B, reduced
}


def random_model(shape: str, format: str = "f32", seed: int = 0) -> LoadedModel:
    """A model with random weights and without a tokenizer; its speed is that of a real model of this shape."""
    if shape not in SHAPES:
        raise ConfigError(f"unknown shape {shape!r}: use one of {', '.join(SHAPES)}")
    config, stored_as = SHAPES[shape], QuantFormat.parse(format)
    generator = np.random.default_rng(seed)

    def matrix(name: str, size: tuple[int, ...]) -> QuantizedTensor:
        rows, width = size
        num_drawn = min(rows, max(1, DISTINCT_VALUES // width))
        drawn = generator.standard_normal((num_drawn, width), dtype=np.float32) / np.float32(math.sqrt(width))
        data = QuantizedTensor.quantize(drawn, stored_as, name).data
        repeated = np.tile(data, (-(-rows // num_drawn), 1))[:rows]
        return QuantizedTensor(stored_as, np.ascontiguousarray(repeated), size)

    def vector(name: str, size: tuple[int, ...]) -> np.ndarray:
        return np.ones(size, np.float32)

    weights = assemble(config, family_of(config).hf_names, matrix, vector)
    return LoadedModel(Path(f"random-{shape}-{format.lower()}"), config, weights=weights)


def open_model(model: str | None, shape: str | None, format: str = "f32") -> LoadedModel:
    """The model of a benchmark: a file, folder or name, or random weights of a shape."""
    if model is not None and shape is not None:
        raise ConfigError("pass --model or --shape, not both: a shape is a model with random weights")
    if model is None:
        return random_model(shape or "tiny", format)
    from bifolio.model.loader import load_model

    return load_model(model)


def stored_format(model: LoadedModel) -> str:
    """The format of the layers' matrices, as in names of model files: f32, q4_1, or several joined by '+'."""
    parts = [part for layer in model.weights.layers for part in (*layer.qkv.parts, *layer.up.parts)]
    names = {part.format.name.lower() if isinstance(part, QuantizedTensor) else str(part.dtype) for part in parts}
    return "+".join(sorted(names))
