"""`bifolio inspect --quant`: the formats of a file, and the form that each takes in memory on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bifolio.cli.inspect import TensorLine

DENSE = "32-bit floats, as every norm and bias"
PACKED = "Q4_0 or Q4_1, with scales and zeros"


def quant_rows(tensors: list[TensorLine]) -> list[dict[str, Any]]:
    """One row for each format of a file's matrices and vectors, the largest first."""
    import math

    from bifolio.kernels.cpu import CPU_FORMATS, PACKINGS
    from bifolio.model.huggingface.integer_weights import CODES, PACKED_CODES, ZEROS
    from bifolio.model.huggingface.scaled_tensors import FP8
    from bifolio.quant.convert import target_format
    from bifolio.quant.formats import QuantFormat
    from bifolio.quant.fp8 import READ_AS

    rows: dict[tuple[str, bool], dict[str, Any]] = {}
    for tensor in tensors:
        is_matrix = len(tensor.shape) > 1
        values = math.prod(tensor.shape)
        format = READ_AS if tensor.format == FP8 else QuantFormat.__members__.get(tensor.format)
        if tensor.name.endswith((CODES, PACKED_CODES, ZEROS)):  # eight codes in 32 bits
            becomes, held = PACKED, 0.0 if tensor.name.endswith(ZEROS) else 8 * PACKINGS["Q4_1"][1]
        elif tensor.format == QuantFormat.I8.name and tensor.name.endswith(".weight"):  # four values in a byte
            becomes, held = PACKINGS["TQ2_0"][0], 4 * PACKINGS["TQ2_0"][1]
        elif format is None or not format.is_readable:
            becomes, held = "cannot be read", 0.0
        elif not is_matrix:
            becomes, held = DENSE, 32.0
        else:
            becomes, held = PACKINGS[target_format(format, CPU_FORMATS).name]
        row = rows.setdefault(
            (tensor.format, is_matrix),
            {"format": tensor.format, "kind": "matrices" if is_matrix else "vectors", "tensors": 0, "values": 0,
             "bytes": 0, "bits": 8 * tensor.nbytes / max(values, 1), "becomes": becomes, "held_bits": held,
             "held_bytes": 0},
        )  # fmt: skip
        row["tensors"] += 1
        row["values"] += values
        row["bytes"] += tensor.nbytes
        row["held_bytes"] += int(values * held / 8)
    return sorted(rows.values(), key=lambda row: -row["bytes"])


def show_quant(path: str, rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    from bifolio.engine.memory import show_bytes
    from bifolio.kernels.cpu import isa

    console = Console(soft_wrap=True, highlight=False)
    table = Table("format", "tensors", "size", "bits", f"in memory, for {isa()}", "bits", "size", box=None)
    for row in rows:
        table.add_row(
            row["format"], f"{row['tensors']} {row['kind']}", show_bytes(row["bytes"]), f"{row['bits']:.2f}",
            row["becomes"], f"{row['held_bits']:.2f}", show_bytes(row["held_bytes"]),
        )  # fmt: skip
    console.print(f"{path}: weights as they lie in the file, and as the CPU kernels hold them", markup=False)
    console.print(table, markup=False)
    total, held = (sum(row[key] for row in rows) for key in ("bytes", "held_bytes"))
    values = sum(row["values"] for row in rows)
    console.print(
        f"all: {values:,} values, {show_bytes(total)} in the file, {show_bytes(held)} in memory", markup=False
    )
