"""Model files with random weights: folders in bf16 and GGUF files in any format, written by the product's own writers.

Speed does not depend on the values, so a matrix is a run of blocks out of a pool for its width:

    pool     |<--------------------------- blocks --------------------------->|
    matrix                  |<- row 0 ->|<- row 1 ->|<- row 2 ->| ...            continued at the start of the pool

The number of blocks has no divisor in common with the blocks of a row, so that no two rows of a matrix are equal, and
logits have no ties.
"""

from __future__ import annotations

import json
import math
import random
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bifolio.config import ModelConfig
from bifolio.kernels.cpu import SEARCHED_FORMATS, encoded
from bifolio.model.families import family_of
from bifolio.model.gguf.mixes import MIXES, Mix
from bifolio.model.gguf.writer import write_gguf
from bifolio.model.huggingface.folder_writer import write_folder
from bifolio.model.loaded import LoadedModel
from bifolio.model.tensor_names import assemble, network_tensors
from bifolio.quant.formats import ENCODABLE_FORMATS, QuantFormat
from bifolio.quant.tensor import QuantizedTensor

Blocks = NDArray[np.uint8]  # [blocks, bytes of a block]

POOL_VALUES = 1 << 25
# Formats that the product reads and does not write, by the number of the file type: files of random codes.
LOW_BITS = {"q2_k": 10, "q3_k": 12, "iq2_xxs": 19, "iq2_xs": 20, "iq3_xxs": 23, "iq1_s": 24, "iq3_s": 26, "iq2_s": 28,
            "iq1_m": 31}  # fmt: skip
SCALES = {"Q2_K": (80, 82), "Q3_K": (108,)}  # where the half floats of a block lie; elsewhere at its start


def mix_of(format: str) -> Mix:
    """The mix of a format, low-bit ones included."""
    if format in LOW_BITS:
        return Mix(format, QuantFormat[format.upper()], LOW_BITS[format])
    return MIXES["q4_k_m" if format == "q4_k" else format]


def write_model(path: Path, config: ModelConfig, format: str) -> None:
    """Write a GGUF file, or a folder with a tokenizer where the path has no suffix `.gguf`."""
    names, mix = family_of(config).hf_names, mix_of(format)
    weights = RandomWeights(config, mix.format)
    model = LoadedModel(Path(path.stem), config, weights=assemble(config, names, weights.matrix, vector))
    if path.suffix == ".gguf":
        write_gguf(path, model, mix, overwrite=True)
        return
    write_folder(path, model, mix.format, overwrite=True)
    write_tokenizer(path, config.vocab_size)


class RandomWeights:
    """Matrices of one format."""

    def __init__(self, config: ModelConfig, format: QuantFormat) -> None:
        self._format = format
        self._most: dict[int, int] = {}  # width: values of the largest matrix
        for shape in network_tensors(config, family_of(config).hf_names).values():
            self._most[shape[-1]] = max(self._most.get(shape[-1], 0), math.prod(shape))
        self._pools: dict[int, tuple[QuantFormat, Blocks]] = {}

    def matrix(self, name: str, size: tuple[int, ...]) -> QuantizedTensor:
        rows, width = math.prod(size[:-1]), size[-1]
        if width not in self._pools:
            self._pools[width] = self._pool(width)
        format, pool = self._pools[width]
        count = rows * format.row_bytes(width) // format.block_bytes
        blocks = cyclic(pool, zlib.crc32(name.encode()) % len(pool), count)
        return QuantizedTensor(format, blocks.reshape(rows, -1), size, name)

    def _pool(self, width: int) -> tuple[QuantFormat, Blocks]:
        """(format, blocks) for rows of `width` values; rows that cannot be cut into blocks are in F16."""
        format = self._format if width % self._format.block_elements == 0 else QuantFormat.F16
        in_row = width // format.block_elements
        count = min(self._most.get(width, 0), POOL_VALUES) // format.block_elements
        count = max(count, in_row + 1)
        while math.gcd(count, in_row) > 1:
            count += 1
        return format, random_blocks(format, count, 1 / math.sqrt(width))


def cyclic(pool: Blocks, start: int, count: int) -> Blocks:
    """`count` blocks from `start` on, continued at the start of the pool; a view where they are contiguous."""
    parts = [pool[start : start + count]]
    while (left := count - sum(map(len, parts))) > 0:
        parts.append(pool[:left])
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def random_blocks(format: QuantFormat, count: int, scale: float) -> Blocks:
    """Blocks of normally distributed values; random codes with a fixed scale where the product cannot encode."""
    generator, size = np.random.default_rng(0), format.block_elements
    if format in ENCODABLE_FORMATS or format in SEARCHED_FORMATS:
        values = generator.standard_normal((count, size), dtype=np.float32) * np.float32(scale)
        if format in SEARCHED_FORMATS:
            return encoded(QuantizedTensor.from_array(values), format, "random values").data
        return QuantizedTensor.quantize(values, format).data.reshape(count, format.block_bytes)
    blocks = generator.integers(0, 256, (count, format.block_bytes), dtype=np.uint8)
    blocks[:, 1] &= 0x3F  # a finite half float, in every format
    if format is QuantFormat.IQ1_M:  # a quarter of the scale in the high bits of each of four words
        blocks[:, 49::2] = (blocks[:, 49::2] & 0x0F) | np.array([0xF0, 0x10, 0x10, 0x20], np.uint8)
        return blocks
    for place in SCALES.get(format.name, (0,)):
        blocks[:, place : place + 2] = np.array([scale / 32], np.float16).view(np.uint8)
    return blocks


def vector(name: str, size: tuple[int, ...]) -> NDArray[np.float32]:
    return np.full(size, 0.0 if name.endswith(".bias") else 1.0, np.float32)


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A vocabulary of two special tokens, all bytes, and made-up words, in which JSON can be written."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    draws = random.Random(0)
    tokens = {"<s>": 0, "</s>": 1}
    for symbol in sorted(pre_tokenizers.ByteLevel.alphabet()):
        tokens[symbol] = len(tokens)
    while len(tokens) < vocab_size:
        word = "".join(draws.choices("abcdefghijklmnopqrstuvwxyz", k=draws.randint(2, 9)))
        tokens.setdefault(("\u0120" if draws.random() < 0.5 else "") + word, len(tokens))
    tokenizer = Tokenizer(models.BPE(tokens, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
