"""Models with random weights in the shapes of real models, for speed measurements: `ModelWeights` and GGUF files.

All matrices have one format, or those of a mix: in a `Mix` like q4_k_m some layers have more bits, as in real files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np

from bifolio.config import ModelConfig, RopeConfig
from bifolio.kernels.interface import Linear, Norm
from bifolio.model.export import NamedTensor
from bifolio.model.gguf.mixes import Mix
from bifolio.model.weights import LayerWeights, ModelWeights, attention_shape, inverse_frequencies
from bifolio.quant.formats import QuantFormat
from bifolio.quant.tensor import QuantizedTensor

# The half floats of a block, by their place: products of about 0.05 with the codes.
SCALES = {
    QuantFormat.Q8_0: {0: 0.05 / 127},
    QuantFormat.Q4_0: {0: 0.05 / 8},
    QuantFormat.Q4_1: {0: 0.05 / 8, 2: -0.05},
    QuantFormat.Q4_K: {0: 0.05 / 8 / 32, 2: 0.05 / 32},
    QuantFormat.Q6_K: {208: 0.05 / 32 / 64},
}


def model_config(name: str) -> ModelConfig:
    """S: SmolLM2-135M. M: Llama-3.2-1B. T: TinyLlama-1.1B."""
    sizes = {
        "S": (49152, 576, 30, 9, 3, 1536),
        "M": (128256, 2048, 16, 32, 8, 8192),
        "T": (32000, 2048, 22, 32, 4, 5632),
    }
    vocab, hidden, layers, heads, kv_heads, ffn = sizes[name]
    return ModelConfig(
        architecture="llama",
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=64,
        intermediate_size=ffn,
        max_position=8192,
        tie_embeddings=True,
        ropes=(RopeConfig(theta=100000.0, rotary_dim=64),),
        rope_interleaved=False,
    )


def random_tensor(rows: int, columns: int, format: QuantFormat, rng: np.random.Generator) -> QuantizedTensor:
    """Random codes with realistic scales, as a repeated pattern: the speed does not depend on the values."""
    row_bytes = format.row_bytes(columns)
    pattern = min(rows, 256)
    if format in (QuantFormat.F32, QuantFormat.F16, QuantFormat.BF16):
        values = rng.standard_normal((pattern, columns)).astype(np.float32) * 0.02
        data = QuantizedTensor.quantize(values, format).data
    else:
        data = rng.integers(0, 256, (pattern, row_bytes), dtype=np.uint8)
        blocks = data.reshape(pattern, -1, format.block_bytes)
        for start, value in SCALES[format].items():
            blocks[:, :, start : start + 2] = np.frombuffer(np.float16(value).tobytes(), np.uint8)
    repeated = np.concatenate([data] * -(-rows // pattern))[:rows]
    return QuantizedTensor(format, repeated, (rows, columns))


def format_of(name: str, shape: tuple[int, int], config: ModelConfig, format: QuantFormat | Mix) -> QuantFormat:
    """The format of a matrix; the embedding is the output, too."""
    if isinstance(format, QuantFormat):
        return format
    kind: Literal["embedding", "matrix"] = "embedding" if name == "token_embd" else "matrix"
    unread = QuantizedTensor.from_array(np.zeros(shape, np.float32))
    return format.format_of(NamedTensor(f"{name}.weight", unread, kind), config, has_importance=False)


def tensors(config: ModelConfig, format: QuantFormat | Mix) -> dict[str, QuantizedTensor]:
    """Tensors by GGUF name."""
    rng = np.random.default_rng(0)
    d, ffn = config.hidden_size, config.intermediate_size
    shapes = {"token_embd": (config.vocab_size, d)}
    for i in range(config.num_layers):
        shapes |= {
            f"blk.{i}.attn_q": (config.query_size, d),
            f"blk.{i}.attn_k": (config.kv_size, d),
            f"blk.{i}.attn_v": (config.kv_size, d),
            f"blk.{i}.attn_output": (d, config.query_size),
            f"blk.{i}.ffn_gate": (ffn, d),
            f"blk.{i}.ffn_up": (ffn, d),
            f"blk.{i}.ffn_down": (d, ffn),
        }
    return {name: random_tensor(*shape, format_of(name, shape, config, format), rng) for name, shape in shapes.items()}


def random_weights(config: ModelConfig, format: QuantFormat | Mix) -> ModelWeights:
    named = tensors(config, format)
    norm = Norm(np.ones(config.hidden_size, np.float32), None, config.norm_eps)

    def linear(*names: str) -> Linear:
        return Linear(tuple(named[name] for name in names), (None,) * len(names))

    layers = tuple(
        LayerWeights(
            shape=attention_shape(config, i),
            attention_norm=norm,
            qkv=linear(f"blk.{i}.attn_q", f"blk.{i}.attn_k", f"blk.{i}.attn_v"),
            output=linear(f"blk.{i}.attn_output"),
            post_attention_norm=None,
            mlp_norm=norm,
            up=linear(f"blk.{i}.ffn_gate", f"blk.{i}.ffn_up"),
            down=linear(f"blk.{i}.ffn_down"),
            post_mlp_norm=None,
            rope=0,
        )
        for i in range(config.num_layers)
    )
    frequencies, scale = inverse_frequencies(config.ropes[0])
    return ModelWeights(config, named["token_embd"], None, layers, norm, linear("token_embd"), (frequencies,), (scale,))


def write_gguf(config: ModelConfig, format: QuantFormat | Mix, path: Path) -> None:
    """Write the network as a GGUF file without a vocabulary, for other programs."""
    import gguf

    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(config.max_position)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.ropes[0].theta)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    for name, tensor in tensors(config, format).items():
        kind = gguf.GGMLQuantizationType(tensor.format.ggml_type)
        writer.add_tensor(f"{name}.weight", tensor.data, raw_dtype=kind)
    ones = np.ones(config.hidden_size, np.float32)
    for i in range(config.num_layers):
        writer.add_tensor(f"blk.{i}.attn_norm.weight", ones)
        writer.add_tensor(f"blk.{i}.ffn_norm.weight", ones)
    writer.add_tensor("output_norm.weight", ones)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
