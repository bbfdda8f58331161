"""Launches of `code_product.cu`: several rows times a matrix in codes (`triton.row_layouts`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from bifolio.kernels.cuda import nvrtc
from bifolio.kernels.cuda.row_product import CODED, KNOWN, SHARED_BYTES

SOURCES = "common", "activations", "code_scales", "code_product"
MOST_ROWS = 128  # of x, of a thread block
MOST_STAGES = 4
BLOCK = 128  # columns that a warp multiplies at a time
GROUP_BYTES = 2, 4, 2, 1  # of the factors of a group, by SCALES
TOP_BYTES = 0, 0, 4, 4  # of those of 256 columns


@dataclass(frozen=True, slots=True)
class CodeTile:
    """How a product is divided among warps and thread blocks."""

    rows: int  # of x
    tiles: int  # of 16 rows of the weight, of a warp
    across: int  # warps that divide the rows of the weight
    along: int  # warps that divide the columns
    stages: int  # of columns, in flight
    splits: int = 1  # thread blocks that divide the columns: a cluster

    @property
    def warps(self) -> int:
        return self.across * self.along

    @property
    def height(self) -> int:
        """Rows of the weight."""
        return 16 * self.tiles * self.across

    def shared_bytes(self, codes: Mapping[str, int]) -> int:
        columns, kind = BLOCK * self.along, codes["SCALES"]
        own = columns * (codes["LOW"] + codes["HIGH"]) // 8
        own += columns // codes["GROUP"] * GROUP_BYTES[kind] + columns // 256 * TOP_BYTES[kind]
        stage = 2 * columns * self.rows + self.height * own
        return max(self.stages * stage, 4 * self.along * self.rows * (self.height + 4))


def fitting(tile: CodeTile, codes: Mapping[str, int], limit: int = SHARED_BYTES) -> CodeTile | None:
    """The tile with as many of its stages as fit; None: not even two do."""
    for stages in range(tile.stages, 1, -1):
        tile = replace(tile, stages=stages)
        if tile.shared_bytes(codes) <= limit:
            return tile
    return None


def tile_for(num_rows: int, outputs: int, codes: Mapping[str, int], *, gated: bool) -> CodeTile | None:
    """As measured on an H200 with the products of the 8B shape, at 16 and 64 rows of x.

    `outputs`: rows of the weight, those of gates and up projections.
    """
    rows = min(max(8, 1 << (num_rows - 1).bit_length()), MOST_ROWS)
    if not gated and outputs <= 4224 and rows <= 64:  # few tiles: more warps divide the columns
        return fitting(CodeTile(rows, 2, 2, 4, 3 if rows <= 32 else 2, 2), codes)
    return fitting(CodeTile(rows, 2, 4, 2, MOST_STAGES, 1 if gated or outputs > 8192 else 2), codes)


def can_multiply(
    x: torch.Tensor,  # [rows, depth]
    residual: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    codes: Mapping[str, int],  # constants of the layout
) -> bool:
    """Whether this kernel multiplies such operands, on this device."""
    return (
        codes["SCALES"] in CODED
        and x.is_cuda
        and len(x) > 0
        and x.dtype == torch.bfloat16
        and all(each is None or each.dtype in KNOWN for each in (residual, bias, out))
        and x.stride(0) % 8 == 0
        and x.data_ptr() % 16 == 0
        and out.data_ptr() % 16 == 0
        and nvrtc.works()
    )


def multiply(
    x: torch.Tensor,  # [rows, depth]
    weight: torch.Tensor,  # u8[outputs (times 2 if gated), bytes of a row]
    codes: Mapping[str, int],
    out: torch.Tensor,  # [rows, outputs]  written
    *,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: int,  # of a gate; -1: none
    tile: CodeTile | None = None,
) -> None:
    (num_rows, depth), wide, gated = x.shape, torch.float32, activation >= 0
    tile = tile or tile_for(num_rows, weight.shape[0], codes, gated=gated)
    if tile is None:
        raise ValueError("rows of codes whose parts do not fit into shared memory")
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    module = nvrtc.load_source(
        SOURCES, torch.cuda.current_device(), LOW=codes["LOW"], HIGH=codes["HIGH"], GROUP=codes["GROUP"],
        SCALES=codes["SCALES"], ZERO=codes["ZERO"], ROWS=tile.rows, TILES=tile.tiles, WARPS=tile.warps,
        ACROSS=tile.across, STAGES=tile.stages, CLUSTER=tile.splits, ACTIVATION=activation,
        IS_OUT_WIDE=out.dtype == wide, IS_BIAS_WIDE=bias is not None and bias.dtype == wide,
        IS_RESIDUAL_WIDE=residual is not None and residual.dtype == wide,
    )  # fmt: skip
    height = tile.height // 2 if gated else tile.height
    module.function("code_product").launch(
        (-(-outputs // height) * -(-num_rows // tile.rows) * tile.splits,),
        tile.warps * 32,
        (
            x, weight, x if bias is None else bias, x if residual is None else residual, out, num_rows, outputs,
            x.stride(0), 0 if residual is None else residual.stride(0), out.stride(0), depth, codes["ROW_BYTES"],
            codes["HIGH_AT"], codes["SCALES_AT"], codes["TOPS_AT"], int(bias is not None), int(residual is not None),
        ),
        shared_bytes=tile.shared_bytes(codes),
        pdl=True,
    )  # fmt: skip
