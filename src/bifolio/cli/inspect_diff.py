"""`bifolio inspect --diff`: the differences of two GGUF models."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bifolio.cli import commands
from bifolio.cli.inspect import one_line, plain_value

if TYPE_CHECKING:
    from bifolio.model.gguf.difference import ModelDifference, TensorDifference
    from bifolio.model.gguf.reader import TensorEntry, Value

TENSOR_COLUMNS = ["tensors", "shape", "format", "bytes differ", "values differ", "largest", "rms", "relative rms"]


def show_difference(old: Path, new: Path, tolerance: float, as_json: bool) -> None:
    """Print the differences; ends with exit status 1 if there are any."""
    from bifolio.errors import ConfigError
    from bifolio.model.gguf.difference import compare
    from bifolio.model.gguf.split import open_whole_gguf

    for path in (old, new):
        if path.suffix.lower() != ".gguf":
            raise ConfigError(f"{path} is no GGUF file: --diff compares GGUF files, which `bifolio quantize` writes")
    found = compare(open_whole_gguf(old), open_whole_gguf(new))
    tensors = [tensor for tensor in found.tensors if tensor.exceeds(tolerance)]
    ignored = len(found.tensors) - len(tensors)
    if as_json:
        commands.echo(json.dumps(as_record(old, new, found, tensors, ignored), ensure_ascii=False))
    else:
        show(old, new, found, tensors, ignored)
    if found.metadata or tensors:
        raise commands.Exit(1)


def as_record(
    old: Path, new: Path, found: ModelDifference, tensors: list[TensorDifference], ignored: int
) -> dict[str, Any]:
    metadata = [
        {"key": line.key, "old_type": line.old_type, "new_type": line.new_type, "old": plain(line.old),
         "new": plain(line.new)}
        for line in found.metadata
    ]  # fmt: skip
    rows = [
        {"name": line.name, "old": entry_record(line.old), "new": entry_record(line.new),
         "differing_bytes": line.num_bytes, "values": None if line.values is None else asdict(line.values)}
        for line in tensors
    ]  # fmt: skip
    return {"old": str(old), "new": str(new), "metadata": metadata, "tensors": rows, "equal_tensors": found.num_equal,
            "tensors_within_tolerance": ignored}  # fmt: skip


def plain(value: Value | None) -> Any:
    return None if value is None else plain_value(value)


def entry_record(entry: TensorEntry | None) -> dict[str, Any] | None:
    return None if entry is None else {"shape": entry.shape, "format": entry.format.name, "bytes": entry.nbytes}


def show(old: Path, new: Path, found: ModelDifference, tensors: list[TensorDifference], ignored: int) -> None:
    """Lines as those of `diff`: - stands for the first model, + for the second."""
    lines = [f"- {old}", f"+ {new}"]
    if found.metadata:
        lines += ["", "metadata"]
    for line in found.metadata:
        lines += [
            f"{sign} {line.key} ({kind}): {one_line(plain(value))}"
            for sign, kind, value in (("-", line.old_type, line.old), ("+", line.new_type, line.new))
            if value is not None
        ]
    if tensors:
        lines += ["", *aligned([TENSOR_COLUMNS, *(tensor_cells(tensor) for tensor in tensors)])]
    within = f", {ignored} within the tolerance" if ignored else ""
    equal = f"{len(found.metadata)} keys and {len(tensors)} tensors differ, {found.num_equal} tensors are equal{within}"
    commands.echo("\n".join([*lines, "", equal]))


def aligned(rows: list[list[str]]) -> list[str]:
    """Rows of cells as lines with columns of equal widths."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def tensor_cells(line: TensorDifference) -> list[str]:
    """The cells of one tensor: a missing side is named, and a difference of shape or type shows both."""
    both = [entry for entry in (line.old, line.new) if entry is not None]
    shapes = dict.fromkeys(" x ".join(map(str, entry.shape)) for entry in both)
    formats = dict.fromkeys(entry.format.name for entry in both)
    cells = [line.name, " → ".join(shapes), " → ".join(formats)]
    if len(both) == 1:
        return [*cells, "only in the first" if line.new is None else "only in the second", "", "", "", ""]
    cells.append("" if line.num_bytes is None else f"{line.num_bytes:,} of {both[0].nbytes:,}")
    values = line.values
    if values is None:
        return [*cells, "", "", "", ""]
    relative = f"{values.rms / values.old_rms:.2%}" if values.old_rms else ""
    non_finite = f", {values.num_non_finite:,} not finite" if values.num_non_finite else ""
    return [*cells, f"{values.num_values:,}{non_finite}", f"{values.largest:.4g}", f"{values.rms:.4g}", relative]
