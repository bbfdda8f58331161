"""Values as the extension module takes them: arrays, codes, and the constants of norms, routers and layers."""

from __future__ import annotations

from typing import Any

import numpy as np

from bifolio.kernels.interface import (
    AdapterUse,
    Array,
    AttentionShape,
    Batch,
    Norm,
    Recurrence,
    Router,
    Storage,
)
from bifolio.kernels.native.library import library
from bifolio.kernels.recurrence import states_of

ACTIVATION_CODES = {"silu": 0, "gelu_tanh": 1, "gelu": 2, "relu2": 3, "swiglu_clamped": 4, "tanh": 5, "relu": 6,
                    "sigmoid": 7, "silu_clamped": 8}  # fmt: skip
KV_CODES = {"f32": 0, "f16": 1, "bf16": 2, "q8_0": 3}
RECURRENCE_CODES = {"conv": 0, "delta": 1, "mamba": 2, "selective": 3, "lightning": 4, "lru": 5, "keyed": 6}


def floats(array: Array) -> np.ndarray:
    return np.ascontiguousarray(array, np.float32)


def native_norm(norm: Norm | None) -> Any:
    """The norm as an object of the extension module; None: none."""
    if norm is None:
        return None
    return library().Norm(floats(norm.weight), _optional(norm.bias), norm.eps, norm.centered)


def native_router(router: Router, num_experts: int) -> Any:
    return library().Router(
        num_experts,
        router.top_k,
        router.scoring == "sigmoid",
        router.renormalise,
        router.scale,
        _optional(router.bias),
        router.num_groups,
        router.top_groups,
        router.group_best,
        _optional(router.expert_scales),
        router.band,
    )


def native_shape(shape: AttentionShape) -> Any:
    native = library().AttentionShape(
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
        shape.scale,
        shape.window or 0,
        shape.rope_interleaved,
        native_norm(shape.query_norm),
        native_norm(shape.key_norm),
        shape.norm_after_rope,
        shape.softcap,
        shape.temperature,
        shape.temperature_period,
    )
    if shape.in_chunks:
        native = native.of_chunks()
    if shape.temperature_start:
        native = native.counting_from(shape.temperature_start)
    if shape.slopes is not None:
        native = native.with_slopes(floats(shape.slopes))
    if shape.value_norm is not None:
        native = native.with_value_norm(native_norm(shape.value_norm))
    if shape.queries_only:
        native = native.of_queries()
    if shape.bidirectional:
        native = native.both_ways()
    if shape.causal:
        native = native.of_earlier()
    if shape.top_k:
        native = native.choosing(shape.top_k)
    if shape.bias is not None:
        native = native.with_bias(floats(shape.bias))
    return native if shape.sinks is None else native.with_sinks(floats(shape.sinks))


def native_cache(storage: Storage) -> Any:
    """The native view of a storage's keys and values."""
    sizes = [size for _, size in storage.layout.layer_heads]
    return library().Cache(storage.keys, storage.values, KV_CODES[storage.dtype], sizes)


def native_states(storage: Storage) -> Any:
    """The native view of a storage's recurrent states; None: it has none."""
    return library().States(storage.convolutions, storage.recurrent) if storage.layout.num_states else None


def native_recurrence(r: Recurrence) -> Any:
    """The parameters of a recurrent layer; the convolution is copied, all other arrays are kept."""
    if r.kind == "shift":
        return library().Recurrence.shift(floats(r.factors), r.column, r.window)
    if r.kind == "rwkv":
        own = floats(r.factors).reshape(-1), native_norm(r.norm), r.mixes_values
        return library().Recurrence.rwkv(r.heads, r.key_size, r.value_size, r.channels, *own)
    vectors = (_optional(array) for array in (r.conv_bias, _flat(r.decay), r.bias, r.skip))
    sizes = (r.width, r.channels, r.heads, r.groups, r.key_size, r.value_size)
    options = (r.norm_first, r.norm_groups, *r.dt_limits, r.tiled, r.rate_scale, r.decay_bound)
    weights = floats(r.conv_weight), *vectors, native_norm(r.norm)
    return library().Recurrence(RECURRENCE_CODES[r.kind], *sizes, *weights, *options)


def state_arrays(batch: Batch) -> dict[str, np.ndarray]:
    """Starts, reads and writes of a batch."""
    names = ("starts", "reads", "writes")
    return {
        name: np.ascontiguousarray(array, np.int32)
        for name, array in zip(names, states_of(batch).arrays(), strict=True)
    }


def native_adapters(use: AdapterUse | None) -> dict[str, Any]:
    """The adapters of a batch, and the one of each token."""
    if use is None:
        return {}
    return {
        "adapters": [each.prepared for each in use.loaded],
        "adapter_rows": np.ascontiguousarray(use.rows, np.int32),
    }


def _flat(array: Array | None) -> Array | None:
    return None if array is None else array.reshape(-1)


def _optional(array: Array | None) -> np.ndarray | None:
    return None if array is None else floats(array)
