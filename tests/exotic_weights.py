"""Weights in the formats that bifolio reads but never writes: random blocks, and whole GGUF files of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from bifolio.quant import QuantFormat, QuantizedTensor

# Where the halves of a block lie that scale its values; elsewhere every byte is a valid code.
SCALES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q2_K": (80, 82), "Q6_K": (208,), "Q3_K": (108,), "Q5_1": (0, 2),
          "Q4_1": (0, 2), "TQ1_0": (52,), "TQ2_0": (64,)}  # fmt: skip


def exotic_tensor(
    name: str, rows: int, columns: int, seed: int | None = None, *, scale: float = 0.01
) -> QuantizedTensor:
    """Random values in the format called `name`, with small positive scales."""
    format = QuantFormat[name]
    generator = np.random.default_rng(format.ggml_type if seed is None else seed)
    if name == "F64":
        data = generator.standard_normal((rows, columns)).view(np.uint8)
        return QuantizedTensor(format, data, (rows, columns))
    data = generator.integers(0, 256, (rows, format.row_bytes(columns)), dtype=np.uint8)
    blocks = data.reshape(-1, format.block_bytes)
    if name == "MXFP4":
        blocks[:, 0] = 120  # the exponent of a block's scale
    elif name == "NVFP4":
        blocks[:, :4] = 0x2F + blocks[:, :4] % 4  # four small floats of a byte each
    elif name == "IQ1_M":  # a quarter of the half in the high bits of each of four words
        blocks[:, 49::2] &= 0x0F
        blocks[:, 49::2] |= np.array([0xF0, 0x10, 0x10, 0x20], np.uint8)
    elif format.is_quantized:
        for place in SCALES.get(name, (0,)):
            blocks[:, place : place + 2] = np.array([scale], np.float16).view(np.uint8)
    return QuantizedTensor(format, data, (rows, columns))


def write_llama(path: Path, tensors: Mapping[str, QuantizedTensor | np.ndarray], **entries: float | str) -> Path:
    """A llama file of these tensors, written by the gguf package."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    for key, value in entries.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add("llama." + key.replace("__", "."), value)
    for name, tensor in tensors.items():
        if isinstance(tensor, QuantizedTensor):
            kind = gguf.GGMLQuantizationType(tensor.format.ggml_type)
            writer.add_tensor(name, tensor.data, raw_shape=tensor.data.shape, raw_dtype=kind)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def k_quant_llama(path: Path, *, tied: bool = True, few_bits: str | None = None) -> Path:
    """A small random llama whose matrices are Q4_K, Q6_K and Q5_0, as a Q4_K_M file mixes them; or, in place of Q4_K
    and Q5_0, of the format called `few_bits`."""
    d, ffn, vocab, layers = 256, 512, 320, 2
    tensors: dict[str, QuantizedTensor | np.ndarray] = {"token_embd.weight": exotic_tensor("Q6_K", vocab, d, 1)}
    if not tied:
        tensors["output.weight"] = exotic_tensor("Q6_K", vocab, d, 2)
    for layer in range(layers):
        formats = {"attn_q": ("Q4_K", d, d), "attn_k": ("Q4_K", d // 2, d), "attn_v": ("Q6_K", d // 2, d),
                   "attn_output": ("Q4_K", d, d), "ffn_gate": ("Q4_K", ffn, d), "ffn_up": ("Q4_K", ffn, d),
                   "ffn_down": ("Q5_0", d, ffn)}  # fmt: skip
        for number, (name, (usual, rows, columns)) in enumerate(formats.items()):
            format = few_bits if few_bits and usual != "Q6_K" else usual
            tensors[f"blk.{layer}.{name}.weight"] = exotic_tensor(format, rows, columns, 10 * layer + number)
        for name in ("attn_norm", "ffn_norm"):
            tensors[f"blk.{layer}.{name}.weight"] = np.full(d, 0.02, np.float32)
    tensors["output_norm.weight"] = np.full(d, 0.02, np.float32)
    return write_llama(
        path, tensors, embedding_length=d, block_count=layers, feed_forward_length=ffn, context_length=64,
        attention__head_count=4, attention__head_count_kv=2, attention__layer_norm_rms_epsilon=1e-5,
    )  # fmt: skip
