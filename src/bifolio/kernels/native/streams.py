"""`StreamOperations` of the native set: calls of the extension module, and their recording in a program."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from bifolio.kernels.interface import Array, Norm
from bifolio.kernels.native.arguments import ACTIVATION_CODES, Register, floats, native_norm

if TYPE_CHECKING:
    from bifolio.kernels.native.kernel_set import NativeKernels


class NativeStreams:
    """A part of `NativeKernels`."""

    native: Any  # the extension module
    pool: Any  # of its threads

    def add_scaled(self, x: Array, y: Array, scale: float) -> Array:
        out = np.empty(x.shape, np.float32)
        self.native.add_scaled(floats(x), floats(y), scale, out, self.pool)
        return out

    def embed_known(self, table: Any, ids: Array, scale: float) -> Array:
        out = np.empty((len(ids), table.width), np.float32)
        self.native.embed_known(table, np.ascontiguousarray(ids, np.int32), scale, out, self.pool)
        return out

    def norm_groups(self, x: Array, norm: Norm) -> Array:
        out = np.empty(x.shape, np.float32)
        self.native.norm_groups(floats(x), native_norm(self.native, norm), out, self.pool)
        return out

    def columns(self, x: Array, start: int, width: int, factors: Array | None = None) -> Array:
        part = floats(x[:, start : start + width])
        return part if factors is None else part * floats(factors)

    def act_gate(self, x: Array, inputs: Array, start: int, activation: str) -> Array:
        out = np.empty(x.shape, np.float32)
        self.native.act_gate(floats(x), floats(inputs), start, ACTIVATION_CODES[activation], out, self.pool)
        return out

    def sparse_act_mul(self, x: Array, deviations: float, activation: str) -> Array:
        out = np.empty((len(x), x.shape[1] // 2), np.float32)
        self.native.sparse_act_mul(floats(x), deviations, ACTIVATION_CODES[activation], out, self.pool)
        return out

    def mix_streams(self, x: Array, coefficients: Array, streams: int) -> Array:
        out = np.empty((len(x), coefficients.shape[1] // streams * (x.shape[1] // streams)), np.float32)
        self.native.mix_streams(floats(x), floats(coefficients), streams, out, self.pool)
        return out

    def correct_streams(self, x: Array, y: Array, coefficients: Array, active: int) -> Array:
        out = np.empty(x.shape, np.float32)
        self.native.correct_streams(floats(x), floats(y), floats(coefficients), active, out, self.pool)
        return out

    def add_to_streams(self, x: Array, y: Array, first: int) -> Array:
        out = np.empty(x.shape, np.float32)
        self.native.add_to_streams(floats(x), floats(y), first, out, self.pool)
        return out

    def spread_streams(self, x: Array, y: Array) -> Array:
        out = np.empty((len(x), x.shape[1] + y.shape[1]), np.float32)
        self.native.spread_streams(floats(x), floats(y), out, self.pool)
        return out

    def merge_streams(self, x: Array, y: Array) -> Array:
        out = np.empty(x.shape, np.float32)
        self.native.merge_streams(floats(x), floats(y), out, self.pool)
        return out


class StreamRecorder:
    """A part of `ProgramRecorder`."""

    kernels: NativeKernels
    program: Any

    def add_scaled(self, x: Register, y: Register, scale: float) -> Register:
        return Register(self.program.add_scaled(x.number, y.number, scale))

    def embed_known(self, table: Any, ids: object, scale: float) -> Register:
        return Register(self.program.embed_known(table, scale))

    def norm_groups(self, x: Register, norm: Norm) -> Register:
        return Register(self.program.norm_groups(x.number, native_norm(self.kernels.native, norm)))

    def columns(self, x: Register, start: int, width: int, factors: Array | None = None) -> Register:
        return Register(self.program.columns(x.number, start, width, None if factors is None else floats(factors)))

    def act_gate(self, x: Register, inputs: Register, start: int, activation: str) -> Register:
        return Register(self.program.act_gate(x.number, inputs.number, start, ACTIVATION_CODES[activation]))

    def sparse_act_mul(self, x: Register, deviations: float, activation: str) -> Register:
        return Register(self.program.sparse_act_mul(x.number, deviations, ACTIVATION_CODES[activation]))

    def mix_streams(self, x: Register, coefficients: Register, streams: int) -> Register:
        return Register(self.program.mix_streams(x.number, coefficients.number, streams))

    def correct_streams(self, x: Register, y: Register, coefficients: Register, active: int) -> Register:
        return Register(self.program.correct_streams(x.number, y.number, coefficients.number, active))

    def add_to_streams(self, x: Register, y: Register, first: int) -> Register:
        return Register(self.program.add_to_streams(x.number, y.number, first))

    def spread_streams(self, x: Register, y: Register) -> Register:
        return Register(self.program.spread_streams(x.number, y.number))

    def merge_streams(self, x: Register, y: Register) -> Register:
        return Register(self.program.merge_streams(x.number, y.number))
