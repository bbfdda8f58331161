"""The formats that the native kernels take as they lie in a file, and the form that each is packed in."""

from __future__ import annotations

import platform
from typing import Any

import numpy as np

from bifolio.quant.convert import HeldFormats
from bifolio.quant.formats import QuantFormat

# On x86 the scales of Q4_K stay bytes: reading is slower than unpacking there (BIFOLIO_PACKS_Q4_K, native/contracts.h).
Q4_K_PACKINGS = {False: ("4 bits, a scale and a minimum for 32", 5.0), True: ("4 bits, scales of 8 bits for 32", 4.625)}
# How a format is packed: the size of its codes, the values that share a scale, and the bits of a value in all.
PACKINGS = {
    "F32": ("32-bit floats", 32.0),
    "F16": ("16-bit floats", 16.0),
    "BF16": ("16-bit floats", 16.0),
    "Q8_0": ("8 bits, a scale for 32", 8.5),
    "Q4_0": ("4 bits, a scale for 32", 4.5),
    "Q4_1": ("4 bits, a scale and a minimum for 32", 5.0),
    "Q5_0": ("6 bits, a scale for 32", 6.5),
    "Q5_1": ("6 bits, a scale and a minimum for 32", 7.0),
    "Q2_K": ("2 bits as in the file, a scale and a minimum for 16", 2.625),
    "Q3_K": ("3 bits as in the file, a scale for 16", 3.5),
    "Q4_K": Q4_K_PACKINGS[platform.machine() in ("x86_64", "AMD64")],
    "Q5_K": ("6 bits, a scale and a minimum for 32", 7.0),
    "Q6_K": ("6 bits, a scale for 16", 7.0),
    "IQ4_NL": ("4 bits by a table, a scale for 32", 4.5),
    "IQ4_XS": ("4 bits by a table, a scale for 32", 4.5),
    "MXFP4": ("4 bits by a table, a scale for 32", 4.5),
    "NVFP4": ("4 bits by a table, a scale for 16", 5.0),
    "TQ1_0": ("4 bits, a scale for 32", 4.5),
    "TQ2_0": ("4 bits, a scale for 32", 4.5),
    "IQ2_XXS": ("rows of a grid as in the file, a scale for 32", 2.125),
    "IQ2_XS": ("rows of a grid as in the file, a scale for 16", 2.375),
    "IQ2_S": ("rows of a grid as in the file, a scale for 16", 2.625),
    "IQ3_XXS": ("rows of a grid as in the file, a scale for 32", 3.125),
    "IQ3_S": ("rows of a grid as in the file, a scale for 32", 3.5),
    "IQ1_S": ("rows of a grid as in the file, a scale for 32", 1.625),
    "IQ1_M": ("rows of a grid as in the file, a scale for 16", 1.75),
}
FORMAT_CODES = {name: code for code, name in enumerate(PACKINGS)}  # in the order of `FileFormat` (native/blocks.h)
NATIVE_FORMATS = HeldFormats({QuantFormat[name]: bits for name, (_, bits) in PACKINGS.items()})


def format_code(native: Any, format: QuantFormat) -> int:
    """The native code of a format. The grid of an IQ1, IQ2 or IQ3 format is handed over when it is first used."""
    code = FORMAT_CODES[format.name]
    if native.needs_grid(code):
        native.set_grid(code, grid_rows(format))
    return code


def grid_rows(format: QuantFormat) -> np.ndarray:
    """The grid of a format: u8[rows, 4 or 8], each the number of a magnitude. The gguf package has it as data."""
    import gguf  # slow to import, and needed for few files

    kind = getattr(gguf.quants, format.name)
    kind.init_grid()
    values = kind.grid.reshape(kind.grid_shape)
    return np.ascontiguousarray(np.searchsorted(kind.grid_map, values).astype(np.uint8))


def packed_bytes(native: Any, format: QuantFormat, shape: tuple[int, ...]) -> int:
    """Bytes of a matrix as the kernels hold it."""
    return int(native.packed_bytes(FORMAT_CODES[format.name], *shape))
