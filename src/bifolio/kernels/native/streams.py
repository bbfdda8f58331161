"""Operations on parallel streams of the native set: calls of the extension module, and their recording in a program."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from bifolio.kernels.interface import Array
from bifolio.kernels.native.arguments import Register, floats

if TYPE_CHECKING:
    from bifolio.kernels.native.kernel_set import NativeKernels


class NativeStreams:
    """A part of `NativeKernels`."""

    native: Any  # the extension module
    pool: Any  # of its threads

    def mix_streams(self, x: Array, coefficients: Array, streams: int) -> Array:
        out = np.empty((len(x), coefficients.shape[1] // streams * (x.shape[1] // streams)), np.float32)
        self.native.mix_streams(floats(x), floats(coefficients), streams, out, self.pool)
        return out

    def add_to_streams(self, x: Array, y: Array, coefficients: Array | tuple[float, ...]) -> Array:
        out = np.empty(x.shape, np.float32)
        factors = np.broadcast_to(floats(coefficients), (len(x), x.shape[1] // y.shape[1]))
        self.native.add_to_streams(floats(x), floats(y), floats(factors), out, self.pool)
        return out

    def match_streams(self, x: Array, y: Array) -> Array:
        out = np.empty(y.shape, np.float32)
        self.native.match_streams(floats(x), floats(y), out, self.pool)
        return out


class StreamRecorder:
    """A part of `ProgramRecorder`."""

    kernels: NativeKernels
    program: Any

    def mix_streams(self, x: Register, coefficients: Register, streams: int) -> Register:
        return Register(self.program.mix_streams(x.number, coefficients.number, streams))

    def add_to_streams(self, x: Register, y: Register, coefficients: Register | tuple[float, ...]) -> Register:
        factors = coefficients.number if isinstance(coefficients, Register) else list(coefficients)
        return Register(self.program.add_to_streams(x.number, y.number, factors))

    def match_streams(self, x: Register, y: Register) -> Register:
        return Register(self.program.match_streams(x.number, y.number))
