"""Importance matrices: for every column of a matrix, the mean square of the numbers that it is multiplied by.

A file of them is a GGUF file as llama.cpp writes and reads it: for each matrix the sums of squares `NAME.in_sum2` and
the number of rows `NAME.counts`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bifolio.errors import ModelFileError
from bifolio.model.file_access import atomic_path
from bifolio.model.gguf.reader import open_gguf

_SUMS, _COUNTS = ".in_sum2", ".counts"


def read_importance(path: str | Path) -> dict[str, NDArray[np.float32]]:
    """Mean squares by the name of a matrix: f32[k]. Matrices that were never used are left out."""
    file = open_gguf(path)
    if file.metadata.get("general.type") != "imatrix":
        raise ModelFileError(f"{path} is no importance matrix: make one with `bifolio imatrix`")
    found = {}
    for entry in file.entries.values():
        if not entry.name.endswith(_SUMS):
            continue
        name = entry.name.removesuffix(_SUMS)
        if name + _COUNTS not in file.entries:
            raise ModelFileError(f"{path}: the tensor {name + _COUNTS!r} is missing: make the file again")
        sums = file.tensor(entry.name).dequantize().reshape(-1)
        count = float(file.tensor(name + _COUNTS).dequantize().reshape(-1)[0])
        if not np.isfinite(sums).all() or (sums < 0).any() or not np.isfinite(count):
            raise ModelFileError(
                f"{path}: {entry.name!r} holds numbers that are no sums of squares: make the file again"
            )
        if count > 0:
            found[name] = (sums / np.float32(count)).astype(np.float32)
    if not found:
        raise ModelFileError(f"{path} holds no sums of squares: make one with `bifolio imatrix`")
    return found


def write_importance(
    path: Path,
    sums: Mapping[str, NDArray[np.float64]],
    counts: Mapping[str, int],
    *,
    dataset: str,
    chunks: int,
    chunk_size: int,
    overwrite: bool = False,
) -> None:
    """Write sums of squares and numbers of rows by the name of a matrix."""
    import gguf

    logging.getLogger("gguf").setLevel(logging.ERROR)
    with atomic_path(path, overwrite=overwrite) as temporary:
        writer = gguf.GGUFWriter(temporary, "")
        try:
            writer.add_type("imatrix")
            writer.add_array("imatrix.datasets", [dataset])
            writer.add_uint32("imatrix.chunk_count", chunks)
            writer.add_uint32("imatrix.chunk_size", chunk_size)
            for name, values in sums.items():
                writer.add_tensor(name + _SUMS, values.astype(np.float32).reshape(1, -1))
                writer.add_tensor(name + _COUNTS, np.full((1, 1), counts[name], np.float32))
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
        finally:
            writer.close()
