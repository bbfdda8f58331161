"""A GGUF file → `LoadedModel`: weights stay in the file, in the format they have there."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from bifolio.errors import ModelFileError, UnsupportedModelError
from bifolio.model.gguf.config import Metadata, config_from_gguf
from bifolio.model.gguf.reader import GgufFile, TensorEntry, open_gguf
from bifolio.model.gguf.sampling import generation_config_from
from bifolio.model.gguf.tokenizer import has_tokenizer, special_tokens, tokenizer_from_metadata
from bifolio.model.loaded import LoadedModel
from bifolio.model.tensor_names import assemble, gguf_names
from bifolio.quant.formats import Bytes, Floats, QuantFormat
from bifolio.quant.tensor import QuantizedTensor

# Rows of an indirect type that exist as floats at a time while they are converted.
_CONVERSION_ROWS = 256


def load_gguf(path: str | Path) -> LoadedModel:
    """Check and map the file; tensors of types without a kernel are converted once, and a note says so."""
    file = open_gguf(path)
    config = config_from_gguf(file)
    source = TensorSource(file)
    weights = assemble(config, gguf_names(config), source.matrix, source.vector)
    metadata = Metadata(file.metadata, file.path)
    template = file.metadata.get("tokenizer.chat_template")
    return LoadedModel(
        path=file.path,
        config=config,
        weights=weights,
        tokenizer_source=partial(tokenizer_from_metadata, metadata) if has_tokenizer(metadata) else None,
        generation_config=generation_config_from(file.metadata),
        chat_template=template if isinstance(template, str) else None,
        special_tokens=special_tokens(metadata, config.vocab_size),
        notes=source.notes(),
    )


@dataclass
class TensorSource:
    """Hands out tensors by name and shape, and remembers which types it had to convert."""

    file: GgufFile
    converted: dict[tuple[str, str], int] = field(default_factory=dict)  # (from, to) -> tensors

    def matrix(self, name: str, shape: tuple[int, ...]) -> QuantizedTensor:
        entry = self.file.entries.get(name)
        if entry is None:
            raise ModelFileError(f"{self.file.path}: the tensor {name!r} is missing: fetch the whole model again")
        if entry.shape != shape:
            raise ModelFileError(
                f"{self.file.path}: the tensor {name!r} has shape {entry.shape} where the metadata implies {shape}"
            )
        if QuantFormat.from_ggml_type(entry.ggml_type) is not None:
            return self.file.tensor(name)
        tensor = convert_tensor(entry, self.file.raw(name))
        key = (entry.type_name, tensor.format.name)
        self.converted[key] = self.converted.get(key, 0) + 1
        return tensor

    def vector(self, name: str, shape: tuple[int, ...]) -> Floats:
        return self.matrix(name, shape).dequantize()

    def notes(self) -> list[str]:
        return [
            f"{count} tensors of type {old} were converted to {new}, the nearest type with a kernel"
            for (old, new), count in self.converted.items()
        ]


def convert_tensor(entry: TensorEntry, raw: Bytes) -> QuantizedTensor:
    """A tensor of any type that the gguf package can read, in the nearest direct format.

    Q4_K becomes Q4_1 with the same codes (scale and minimum of every 32 values are multiplied out); other quantised
    types become Q8_0, which adds next to no error of its own; whole numbers and doubles become F32.
    """
    if entry.type_name == "Q4_K":
        return QuantizedTensor(QuantFormat.Q4_1, _q4_k_as_q4_1(raw), entry.shape)
    format = QuantFormat.F32 if entry.type_name in ("F64", "I8", "I16", "I32", "I64") else QuantFormat.Q8_0
    result = np.empty((raw.shape[0], format.row_bytes(entry.shape[-1])), np.uint8)
    for start in range(0, raw.shape[0], _CONVERSION_ROWS):
        panel = slice(start, start + _CONVERSION_ROWS)
        result[panel] = QuantizedTensor.quantize(_dequantize_any(entry, raw[panel]), format, entry.name).data
    return QuantizedTensor(format, result, entry.shape)


def _dequantize_any(entry: TensorEntry, rows: Bytes) -> Floats:
    plain = {"F64": "<f8", "I8": "i1", "I16": "<i2", "I32": "<i4", "I64": "<i8"}.get(entry.type_name)
    if plain is not None:
        return np.ascontiguousarray(rows).view(plain).astype(np.float32)
    import gguf

    try:
        values: Floats = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(entry.ggml_type))
    except NotImplementedError:
        raise UnsupportedModelError(
            f"tensor {entry.name!r} has type {entry.type_name}, which cannot be read: use a file in another type"
        ) from None
    return values


def _q4_k_as_q4_1(raw: Bytes) -> Bytes:
    """Q4_K: |d: f16|dmin: f16|8 scales and 8 minimums of 6 bits in 12 bytes|128 bytes of nibbles|, 256 values.

    Each 32 bytes of nibbles hold 32 low ones, then 32 high ones: two groups of 32 values.
    """
    blocks = raw.reshape(-1, 144)
    result = np.empty((blocks.shape[0], 8, 20), np.uint8)
    for start in range(0, blocks.shape[0], 4096):
        panel = slice(start, start + 4096)
        part = blocks[panel]
        halves = part[:, :4].copy().view(np.float16).astype(np.float32)
        scales, minimums = _six_bit_pairs(part[:, 4:16])
        result[panel, :, 0:2] = (halves[:, :1] * scales).astype(np.float16)[..., None].view(np.uint8)
        result[panel, :, 2:4] = (halves[:, 1:] * -minimums).astype(np.float16)[..., None].view(np.uint8)
        packed = part[:, 16:].reshape(-1, 4, 1, 32)
        codes = np.concatenate([packed & 15, packed >> 4], axis=2).reshape(-1, 8, 32)
        result[panel, :, 4:] = codes[..., :16] | (codes[..., 16:] << np.uint8(4))
    return result.reshape(raw.shape[0], -1)


def _six_bit_pairs(packed: Bytes) -> tuple[Floats, Floats]:
    """Scales and minimums, f32[n, 8] each: four in the low 6 bits of a byte, four put together of 4 and 2 bits."""
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], axis=1)
    minimums = np.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=1)
    return scales.astype(np.float32), minimums.astype(np.float32)
