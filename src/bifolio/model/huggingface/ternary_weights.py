"""Folders of BitNet: weights of -1, 0 and 1 times one scale, read as TQ2_0, or as Q4_0 where rows are no whole blocks.

    offline   weight u8[rows / 4, columns]   weight_scale [1]   four rows in a byte: row + n * rows / 4 in the bits 2n
    online    weight [rows, columns] as trained: each value is rounded to -1, 0 or 1 times the mean of the absolute ones

Linear layers of the class `bitlinear` are divided by the scale, those of `autobitlinear` multiplied by it. Scales are
half floats. Activations are rounded as for other weights of these types; transformers rounds them to 8 bits by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from bifolio.errors import ModelFileError, UnsupportedModelError
from bifolio.model.huggingface.json_object import JsonObject
from bifolio.model.huggingface.safetensors_file import Tensors
from bifolio.model.huggingface.scaled_tensors import FolderMap
from bifolio.quant.formats import Bytes, QuantFormat
from bifolio.quant.late_tensor import LateTensor
from bifolio.quant.tensor import QuantizedTensor

PACKED, SCALE = "U8", "_scale"  # the type of packed weights, and the end of the names of scales
IN_BYTE = 4  # rows
SMALLEST = 1e-5  # scale of weights that are rounded at load
CLASSES, MODES = ("bitlinear", "autobitlinear"), ("offline", "online")
Codes = np.ndarray  # u8[rows, columns]  values + 1


class Ternary(NamedTuple):
    """How a folder stores ternary weights."""

    divides: bool  # by the scale
    is_online: bool
    kept: tuple[str, ...]  # parts of the names of linear layers that are not ternary


def read_ternary(found: JsonObject) -> Ternary | None:
    """The layout that `quantization_config` describes; None if it is another one."""
    if found.get("quant_method") != "bitnet":
        return None
    layer, mode = found.text("linear_class", CLASSES[0]), found.text("quantization_mode", MODES[0])
    for key, value, known in (("linear_class", layer, CLASSES), ("quantization_mode", mode, MODES)):
        if value not in known:
            raise UnsupportedModelError(f"BitNet weights with {key} = {value!r} are not supported; supported: {known}")
    if found.flag("use_rms_norm", False):
        raise UnsupportedModelError("BitNet layers with a norm of their own (use_rms_norm) are not supported")
    return Ternary(layer == CLASSES[0], mode == MODES[1], found.texts("modules_to_not_convert"))


class TernaryMap(FolderMap):
    """The tensors of a folder by name, with the values of its ternary weights."""

    def __init__(self, files: Sequence[Tensors], ternary: Ternary) -> None:
        super().__init__(files)
        self._ternary = ternary

    def __getitem__(self, name: str) -> QuantizedTensor:
        if self._file_of[name].dtype_of(name) == PACKED and name + SCALE in self:
            return self._packed(name)
        return self._rounded(name) if self._ternary.is_online and self._is_rounded(name) else super().__getitem__(name)

    def _is_rounded(self, name: str) -> bool:
        is_linear = ".layers." in name and name.endswith("_proj.weight")
        return is_linear and not any(part in name for part in self._ternary.kept)

    def _packed(self, name: str) -> LateTensor:
        file, scale = self._file_of[name], super().__getitem__(name + SCALE).dequantize()
        shape = file.shape_of(name)
        if len(shape) != 2 or scale.size != 1:
            raise ModelFileError(f"the packed weights {name!r} have shape {shape} and a scale of shape {scale.shape}")
        stored, factor = file.bytes_of(name).reshape(shape), float(scale.reshape(-1)[0])
        if self._ternary.divides:
            factor = 1 / factor if factor else np.inf
        columns = shape[1]
        return LateTensor(
            format_of(columns), (shape[0] * IN_BYTE, columns), name, stored,
            lambda: blocks(unpacked(stored, name), factor, name),
        )  # fmt: skip

    def _rounded(self, name: str) -> LateTensor:
        trained = super().__getitem__(name)
        return LateTensor(format_of(trained.shape[-1]), trained.shape, name, trained.stored, partial(rounded, trained))


def format_of(columns: int) -> QuantFormat:
    return QuantFormat.Q4_0 if columns % QuantFormat.TQ2_0.block_elements else QuantFormat.TQ2_0


def unpacked(stored: Bytes, name: str) -> Codes:
    codes = np.concatenate([stored >> 2 * place & 3 for place in range(IN_BYTE)])
    if (codes == 3).any():
        raise ModelFileError(f"the packed weights {name!r} contain values other than -1, 0 and 1")
    return codes


def rounded(trained: QuantizedTensor) -> Bytes:
    values = trained.dequantize()
    scale = max(float(np.abs(values).mean()), SMALLEST)
    codes = np.clip(np.rint(values / np.float32(scale)), -1, 1) + 1
    return blocks(codes.astype(np.uint8), scale, trained.name)


def blocks(codes: Codes, factor: float, name: str) -> Bytes:
    """u8[rows, bytes of a row]: the codes in blocks of `format_of`."""
    rows, columns = codes.shape
    format = format_of(columns)
    count = columns // format.block_elements
    scale = np.array([factor]).astype("<f2")
    if not np.isfinite(scale).all():
        raise ModelFileError(f"the ternary weights {name!r} have the scale {factor}, which is no half float")
    scales = np.broadcast_to(scale.view(np.uint8), (rows, count, 2))
    if format is QuantFormat.TQ2_0:
        parts = codes.reshape(rows, count, 2, 4, 32)
        packed = parts[..., 0, :] | parts[..., 1, :] << 2 | parts[..., 2, :] << 4 | parts[..., 3, :] << 6
        whole = np.concatenate([packed.reshape(rows, count, -1), scales], axis=-1)
    else:
        halves = (codes + 7).reshape(rows, count, 2, 16)
        whole = np.concatenate([scales, halves[:, :, 0] | halves[:, :, 1] << 4], axis=-1)
    return whole.reshape(rows, -1)
