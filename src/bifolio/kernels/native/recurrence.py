"""Recurrent layers of the native kernel set: parameters, states and batches as the extension module takes them."""

from __future__ import annotations

from typing import Any

import numpy as np

from bifolio.kernels.interface import Batch, Recurrence, Storage
from bifolio.kernels.native.arguments import floats, native_norm
from bifolio.kernels.recurrence import states_of

KIND_CODES = {"conv": 0, "delta": 1, "mamba": 2}


def native_recurrence(native: Any, r: Recurrence) -> Any:
    """The parameters of a layer; the convolution is copied, all other arrays are kept."""
    norm = None if r.norm is None else native_norm(native, r.norm)
    vectors = (None if array is None else floats(array) for array in (r.conv_bias, r.decay, r.bias, r.skip))
    sizes = (r.width, r.channels, r.heads, r.groups, r.key_size, r.value_size)
    options = (r.norm_first, r.norm_groups, *r.dt_limits, r.tiled)
    return native.Recurrence(KIND_CODES[r.kind], *sizes, floats(r.conv_weight), *vectors, norm, *options)


def native_states(native: Any, storage: Storage) -> Any:
    """The native view of a storage's states; None: it has none."""
    return native.States(storage.convolutions, storage.recurrent) if storage.layout.num_states else None


def state_arrays(batch: Batch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Starts, reads and writes of a batch."""
    use = states_of(batch)
    starts, reads, writes = (np.ascontiguousarray(array, np.int32) for array in (use.starts, use.reads, use.writes))
    return starts, reads, writes
