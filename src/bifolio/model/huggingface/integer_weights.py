"""Folders with weights in 4 bits (AWQ, GPTQ, compressed-tensors), read as Q4_0 or Q4_1 without quantising again.

A weight is scale * (code - zero), with one scale and one zero for `group_size` columns of a row. These are blocks of 32
columns with the same scale: Q4_0 if every zero is 8, otherwise Q4_1, whose minimum is -scale * zero.

    AWQ      qweight i32[columns, rows / 8]    qzeros i32[groups, rows / 8]    scales [groups, rows]
    GPTQ     qweight i32[columns / 8, rows]    qzeros i32[groups, rows / 8]    scales [groups, rows]    g_idx [columns]
    packed   weight_packed i32[rows, columns / 8]    weight_scale [rows, groups]    zeros of 8
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from bifolio.errors import MissingDependencyError, ModelFileError, UnsupportedModelError
from bifolio.kernels.cpu import pack_codes
from bifolio.model.huggingface.json_object import JsonObject
from bifolio.model.huggingface.safetensors_file import Tensors
from bifolio.model.huggingface.scaled_tensors import FolderMap
from bifolio.model.plain_values import shown
from bifolio.quant.formats import QuantFormat
from bifolio.quant.late_tensor import LateTensor
from bifolio.quant.tensor import QuantizedTensor

BLOCK = 32
WORD = 8  # codes in 32 bits
MIDDLE = 8  # the zero of symmetric weights
CODES, PACKED_CODES, ZEROS = ".qweight", ".weight_packed", ".qzeros"  # ends of names
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of the codes of a word, by row


class Packing(NamedTuple):
    """The layout of a folder's weights."""

    method: str  # awq, gptq or packed
    group_size: int  # columns; -1: all of a row
    zero_offset: int = 0  # added to stored zeros

    @property
    def suffix(self) -> str:
        return PACKED_CODES if self.method == "packed" else CODES

    @property
    def scales_suffix(self) -> str:
        return ".weight_scale" if self.method == "packed" else ".scales"


def read_packing(found: JsonObject) -> Packing | None:
    """The layout that `quantization_config` describes; None if it is another one."""
    method = found.get("quant_method")
    if method == "compressed-tensors" and found.get("format") == "pack-quantized":
        settings = [group.object("weights") for group in found.object("config_groups").objects()]
        if len(settings) != 1:
            raise UnsupportedModelError("compressed-tensors with several kinds of weights are not supported")
        _require("compressed-tensors", settings[0], num_bits=4, symmetric=True)
        return Packing("packed", settings[0].count("group_size", -1, least=-1) or -1)
    if method == "awq":
        _require("AWQ", found, bits=4, version="gemm", zero_point=True)
        sizes = [found.count(field, 0, least=-1) for field in ("group_size", "q_group_size")]
        return Packing("awq", sizes[0] or sizes[1] or 128)
    if method == "gptq":
        _require("GPTQ", found, bits=4)
        size = found.count("group_size", 128, least=-1) or 128
        return Packing("gptq", size, int(found.get("checkpoint_format") != "gptq_v2"))
    return None


def _require(name: str, found: JsonObject, **wanted: Any) -> None:
    for field, value in wanted.items():
        actual = value if found.get(field) is None else found.get(field)
        if (actual.lower() if isinstance(actual, str) else actual) != value:
            given = actual if isinstance(actual, str) else shown(actual)
            raise UnsupportedModelError(
                f"{name} weights with {field} = {given} are not supported, only with {value}: "
                "use the folder of the original model, or a GGUF file"
            )


class IntegerMap(FolderMap):
    """The tensors of a folder by name; those of packed weights have the names of the original ones."""

    def __init__(self, files: Sequence[Tensors], packing: Packing) -> None:
        super().__init__(files)
        self._packing = packing
        ends = packing.suffix
        self._packed = {name.removesuffix(ends) + ".weight" for name in super().__iter__() if name.endswith(ends)}

    def __getitem__(self, name: str) -> QuantizedTensor:
        return self._late(name.removesuffix(".weight")) if name in self._packed else super().__getitem__(name)

    def __iter__(self) -> Iterator[str]:
        yield from super().__iter__()
        yield from self._packed

    def __len__(self) -> int:
        return super().__len__() + len(self._packed)

    def __contains__(self, name: object) -> bool:
        return name in self._packed or super().__contains__(name)

    def _late(self, name: str) -> LateTensor:
        try:
            words = self.words(name + self._packing.suffix)
            rows, columns = self._shape(words.shape)
            self._check_groups(name, rows, columns)
            format = QuantFormat.Q4_0 if self._is_symmetric(name) else QuantFormat.Q4_1
            stored = words.view(np.uint8)
            return LateTensor(
                format, (rows, columns), f"{name}.weight", stored, lambda: self._blocks(name, stored, columns, format)
            )
        except (KeyError, ValueError, IndexError) as error:
            if isinstance(error, ModelFileError | UnsupportedModelError):
                raise
            raise ModelFileError(f"the packed weights {name!r} are not usable: {error}") from error

    def _shape(self, words: tuple[int, ...]) -> tuple[int, int]:
        """(rows, columns) of a weight from the shape of its words."""
        high, wide = words
        return {"awq": (wide * WORD, high), "gptq": (wide, high * WORD), "packed": (high, wide * WORD)}[
            self._packing.method
        ]

    def _check_groups(self, name: str, rows: int, columns: int) -> None:
        method, size = self._packing.method, self._packing.group_size if self._packing.group_size > 0 else columns
        if method == "packed" and (name + ".weight_zero_point" in self or name + ".weight_g_idx" in self):
            raise UnsupportedModelError(f"the packed weights {name!r} have zeros or an order of their own")
        found = self.shape_of(name + self._packing.scales_suffix)
        scales = found if method == "packed" else found[::-1]
        if size % BLOCK or columns % size or scales != (rows, columns // size):
            raise UnsupportedModelError(
                f"the packed weights {name!r} of shape {(rows, columns)} have groups of {size} columns and scales of "
                f"shape {scales}: groups must be of whole blocks of {BLOCK} columns"
            )
        if method != "packed":
            high, wide = self.shape_of(name + ZEROS)
            if (high, wide * WORD) != found:
                raise ValueError(f"{high} x {wide} words of zeros for scales of shape {found}")
        if method == "gptq":
            self._check_order(name, columns, size)

    def _is_symmetric(self, name: str) -> bool:
        """Whether every zero is the middle of the codes."""
        if self._packing.method == "packed":
            return True
        word = (MIDDLE - self._packing.zero_offset) * 0x11111111
        return bool((self.words(name + ZEROS).view("<u4") == word).all())

    def _blocks(self, name: str, words: np.ndarray, columns: int, format: QuantFormat) -> np.ndarray:
        method = self._packing.method
        scales = self[name + self._packing.scales_suffix].dequantize()
        halves = (scales if method == "packed" else scales.T).astype("<f2")  # [rows, groups]
        if not np.isfinite(halves).all():
            raise ModelFileError(f"the packed weights {name!r} have scales that are not numbers, or too large ones")
        header = [halves] if format is QuantFormat.Q4_0 else [halves, self._minima(name, halves)]
        groups = np.ascontiguousarray(np.stack(header, axis=-1)).reshape(len(halves), -1).view(np.uint8)
        size = 2 * len(header)
        out = np.empty((len(halves), format.row_bytes(columns)), np.uint8)
        try:
            pack_codes(method, words, groups, size, out)
        except MissingDependencyError:
            pack_without_kernels(method, words, groups, size, out)
        return out

    def _minima(self, name: str, scales: np.ndarray) -> np.ndarray:
        words = self.words(name + ZEROS)
        if self._packing.method == "awq":
            zeros = _awq_codes(words)
        else:
            zeros = _codes(words).reshape(len(words), -1).T + np.uint8(self._packing.zero_offset)
        minima: np.ndarray = (-scales.astype(np.float32) * zeros).astype("<f2")
        return minima

    def _check_order(self, name: str, columns: int, size: int) -> None:
        if name + ".g_idx" not in self:
            return
        if not np.array_equal(self.words(name + ".g_idx"), np.arange(columns) // size):
            raise UnsupportedModelError(
                f"the GPTQ weights {name!r} have groups of scattered columns (desc_act), which are not supported: "
                "use the folder of the original model, or a GGUF file"
            )


def _pairs(words: np.ndarray) -> np.ndarray:
    """u8[..., 4]: the bytes of each word, two codes each, the lowest bits first."""
    return np.ascontiguousarray(words).astype("<i4", copy=False).view(np.uint8).reshape(*words.shape, WORD // 2)


def _codes(words: np.ndarray) -> np.ndarray:
    """u8[..., 8]: the codes of each word."""
    pairs = _pairs(words)
    return np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(*words.shape, WORD)


def _awq_codes(words: np.ndarray) -> np.ndarray:
    """u8[8 w, n] of words [n, w]."""
    pairs = np.ascontiguousarray(_pairs(words).transpose(1, 2, 0))
    codes: np.ndarray = np.empty((words.shape[1], WORD, words.shape[0]), np.uint8)
    for row, place in enumerate(AWQ_PLACES):
        pair = pairs[:, place // 2]
        codes[:, row] = pair >> 4 if place % 2 else pair & 15
    return codes.reshape(-1, words.shape[0])


def pack_without_kernels(
    method: str, words: np.ndarray, headers: np.ndarray, header_bytes: int, out: np.ndarray
) -> None:
    """As `pack_codes` of the CPU kernels."""
    words = np.ascontiguousarray(words).view("<i4")
    if method == "awq":
        codes = _awq_codes(words)
    else:
        words = words.T if method == "gptq" else words
        codes = _codes(words).reshape(len(words), -1)
    rows, columns = codes.shape
    blocks = out.reshape(rows, columns // BLOCK, -1)
    groups = headers.reshape(rows, -1, header_bytes)
    blocks[:, :, :header_bytes] = np.repeat(groups, blocks.shape[1] // groups.shape[1], axis=1)
    parts = codes.reshape(rows, columns // BLOCK, 2, BLOCK // 2)
    blocks[:, :, header_bytes:] = parts[:, :, 0] | parts[:, :, 1] << 4
