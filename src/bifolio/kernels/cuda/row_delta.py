"""Launches of `row_delta.cu`: a decode step of a gated delta net for few sequences, in one kernel."""

from __future__ import annotations

from typing import NamedTuple

import torch

from bifolio.kernels.cuda import nvrtc
from bifolio.kernels.interface import Recurrence
from bifolio.kernels.recurrence import L2_EPS

FEW_SEQUENCES = 2
WARPS = 8  # of a thread block
MOST_BLOCKS = 8  # thread blocks of a cluster
TILES = (16, 32, 64, 128)  # columns of a state in a thread block
MOST_PER_THREAD = 64  # numbers of the state in the registers of a thread
MOST_TAPS = 8


class Division(NamedTuple):
    """How a group of heads is divided among the thread blocks of a cluster."""

    members: int  # heads of a group
    tile: int  # columns of a state in a thread block
    tiles: int  # thread blocks of a head

    @property
    def cluster(self) -> int:
        return self.members * self.tiles


def division_of(r: Recurrence) -> Division | None:
    """As many thread blocks as a cluster can have; None: this kernel cannot."""
    if r.heads % r.groups:
        return None
    members = r.heads // r.groups
    for tile in TILES:
        if r.value_size % tile or members * (r.value_size // tile) > MOST_BLOCKS:
            continue
        parts = WARPS * 32 // tile
        if r.key_size % parts == 0 and r.key_size // parts <= MOST_PER_THREAD:
            return Division(members, tile, r.value_size // tile)
    return None


def can_step(r: Recurrence, x: torch.Tensor) -> bool:
    """Whether this kernel computes a decode step of this recurrence, on this device."""
    if r.kind != "delta" or x.dtype != torch.bfloat16 or x.shape[0] > FEW_SEQUENCES or not 1 < r.width <= MOST_TAPS:
        return False
    if r.norm is None or not r.norm_first or r.norm.weight.dtype != torch.float32:
        return False
    return division_of(r) is not None and nvrtc.works()


def row_delta(
    x: torch.Tensor,  # bf16[s, in_features]
    r: Recurrence,
    reads: torch.Tensor,  # i32[s]
    writes: torch.Tensor,  # i32[s]
    windows: torch.Tensor,  # f32[states, width - 1, channels]
    states: torch.Tensor,  # f32[states, heads, key_size, value_size]
) -> torch.Tensor:
    """bf16[s, heads * value_size]; states and windows are replaced."""
    division = division_of(r)
    if division is None or r.norm is None or r.decay is None or r.bias is None:
        raise ValueError(f"no division of {r.heads} heads of {r.value_size}: ask `can_step` first")
    out = torch.empty((x.shape[0], r.heads * r.value_size), dtype=x.dtype, device=x.device)
    if not x.shape[0]:
        return out
    module = nvrtc.load_source(
        ("common", "row_delta"), torch.cuda.current_device(), KEYS=r.key_size, TILE=division.tile, TILES=division.tiles,
        MEMBERS=division.members, CLUSTER=division.cluster, WIDTH=r.width, HAS_BIAS=r.conv_bias is not None,
        IS_TILED=r.tiled, WARPS=WARPS,
    )  # fmt: skip
    module.function("row_delta").launch(
        (division.cluster, r.groups, x.shape[0]),
        WARPS * 32,
        (
            x, windows, states, reads, writes, r.conv_weight, r.bias if r.conv_bias is None else r.conv_bias, r.decay,
            r.bias, r.norm.weight, out, x.stride(0), r.channels, r.key_size**-0.5, L2_EPS, r.norm.eps, r.rate_scale,
        ),
        shared_bytes=0,
        pdl=True,
    )  # fmt: skip
    return out
