"""Weights and noise: the exact numbers that every draw is made of.

Probabilities are integers, so that no sum depends on the order in which it was taken.

A token's weight is `exp((logit - largest logit) / temperature)` in units of 2**-40, cut to an integer
(`kernels.weights`). Integer sums are exact: the total of a row, its running sums, and with them the filters and the
draw are bit for bit the same in numpy, torch and Triton, on the CPU and on a GPU, in a batch of one or of a hundred,
and for the whole vocabulary or for a padded list of candidates. The weights of 2**22 tokens add up to less than 2**63,
and every token that is at least 1e-12 times as likely as the most likely one has a weight.

Noise has no state: a uniform number is a function of (seed, position, stream) and of nothing else. A generator with
state would tie a request's tokens to the order in which steps happened to run; hashing the position of the token makes
preemption, chunking, speculation and neighbours invisible in the output.

Arrays are numpy arrays or torch tensors, under one interface (the array API).
"""

from __future__ import annotations

from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from bifolio.arrays import array_namespace
from bifolio.kernels.weights import ONE, warmth_of, weights_of

Array = Any  # a numpy array or a torch tensor; shapes are given in comments
STREAM_DRAW = 0  # which token is drawn
STREAM_XTC = 1  # whether the likely tokens are excluded at this position
STREAM_ACCEPT = 2  # whether a drafted token is accepted
STREAM_CHILD = 3  # seeds of the further completions of one request

_MASK = (1 << 64) - 1
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2**64 divided by the golden ratio: the increment of splitmix64
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)

_LAST = (1 << 63) - 1  # sorts behind every key
_MAX_GROUP = 64  # values of which only the largest is looked at first
_BLOCK = 256  # weights summed before any is looked at


def is_numpy(values: Array) -> TypeGuard[NDArray[Any]]:
    return isinstance(values, np.ndarray)


def device(values: Array) -> Any:
    """Where the array lies, for the `device=` of functions that make arrays."""
    return "cpu" if is_numpy(values) else values.device


def to_host(values: Array) -> NDArray[Any]:
    """The same numbers as a numpy array; waits for the device."""
    return np.asarray(values.cpu()) if hasattr(values, "cpu") else np.asarray(values)


# -- weights ---------------------------------------------------------------------------------------------------------


def to_weights(shifted: Array) -> Array:
    """i64[r, n] weights of f32[r, n] logits of which the largest is 0."""
    return weights_of(shifted, array_namespace(shifted).zeros_like(shifted[:, :1]))


def cooled_weights(logits: Array, highest: Array, temperature: NDArray[np.float32]) -> Array:
    """i64[r, n] weights of f32[r, n] logits without NaN; highest: f32[r, 1]; temperature: f32[r] on the host."""
    return weights_of(logits, highest, column(array_namespace(logits), warmth_of(temperature), logits))


def cleaned(logits: Array) -> tuple[Array, Array]:
    """(f32[r, n] logits, f32[r, 1] the largest of each row), well-defined also for the output of a broken model.

    NaN counts as excluded (-inf), +inf as the largest finite number, and a row of nothing but -inf has 0 as largest.
    Rows without such values are returned as they are.
    """
    xp = array_namespace(logits)
    highest = xp.max(logits, axis=-1, keepdims=True)  # NaN if there is a NaN in the row
    if bool(xp.all(xp.isfinite(highest))):
        return logits, highest
    logits = _clean(xp, logits)
    highest = xp.max(logits, axis=-1, keepdims=True)
    return logits, xp.where(xp.isfinite(highest), highest, xp.zeros_like(highest))


def shift(logits: Array) -> Array:
    """f32[r, n]: the same distributions with 0 as the largest logit; rows of nothing but -inf stay so."""
    logits, highest = cleaned(logits)
    return logits - highest


def _clean(xp: Any, logits: Array) -> Array:
    excluded = xp.full_like(logits, -float("inf"))
    largest = xp.full_like(logits, float(xp.finfo(xp.float32).max))
    return xp.where(xp.isnan(logits), excluded, xp.where(logits > largest, largest, logits))


def cool(logits: Array, temperature: NDArray[np.float32]) -> Array:
    """f32[r, n]: shifted logits over temperature. Shifting first keeps tiny temperatures from overflowing."""
    return shift(logits) * column(array_namespace(logits), warmth_of(temperature), logits)


def column(xp: Any, numbers: NDArray[Any], like: Array) -> Array:
    """A host array f64[r] as f64[r, 1] beside `like`."""
    return xp.asarray(np.ascontiguousarray(numbers)[:, None], device=device(like))


def log_total(xp: Any, weights: Array) -> Array:
    """f32[r, 1]: logarithm of the sum of the exponentials of the shifted logits."""
    total = xp.astype(xp.sum(weights, axis=-1, keepdims=True), xp.float64) / float(ONE)
    return xp.astype(xp.log(total), xp.float32)


def sort_candidates(mask: Array, values: Array) -> tuple[Array, Array]:
    """The tokens that `mask` selects, by falling value and then by rising id.

    mask: bool[r, n]; values: f32[r, n]. Returns (i64[r, c] ids, f32[r, c] values); rows with fewer than c candidates
    end in values of -inf. Value and id are packed into one integer: sorting those is fast, and no two are equal, so
    every sorting algorithm gives the same order.
    """
    xp, where = array_namespace(values), device(values)
    num_rows, width = values.shape
    flat = xp.nonzero(xp.reshape(mask, (-1,)))[0]
    edges = xp.searchsorted(flat, xp.arange(num_rows + 1, device=where) * width)
    rows = flat // width
    ids = flat - rows * width
    offsets = xp.arange(flat.shape[0], device=where) - edges[:-1][rows]
    longest = max(int(xp.max(edges[1:] - edges[:-1])), 1)
    keys = xp.full((num_rows, longest), _LAST, dtype=xp.int64, device=where)
    keys[rows, offsets] = descending_keys(values[rows, ids], ids)
    return _unpack(xp.sort(keys, axis=-1), values)


def descending_keys(values: Array, ids: Array) -> Array:
    """i64: rising keys order f32 `values` downwards, and equal ones by rising id."""
    xp = array_namespace(values)
    bits = (values + 0.0).view(xp.int32)  # + 0.0 makes -0.0 equal to 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # negative floats have their order reversed
    return (xp.astype(~ordered, xp.int64) << 32) | xp.astype(ids, xp.int64)


def _unpack(keys: Array, like: Array) -> tuple[Array, Array]:
    xp = array_namespace(keys)
    padding = keys == _LAST
    ordered = xp.astype(~(keys >> 32), xp.int32)
    values = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).view(like.dtype)
    ids = xp.where(padding, xp.zeros_like(keys), keys & 0xFFFFFFFF)
    return ids, xp.where(padding, xp.full_like(values, -float("inf")), values)


def kth_bound(values: Array, counts: NDArray[np.int64]) -> Array:
    """f32[r, 1]: a number not above the `counts[row]`-th largest value of each row, and seldom far below; finite.

    The values are dealt into groups, and of the groups' maxima the one of that rank is taken: at least as many values
    reach it. So the vocabulary is read once and never sorted. values: f32[r, n] without NaN; counts: 1 ... n.
    """
    xp = array_namespace(values)
    num_rows, width = values.shape
    group = max(1, min(_MAX_GROUP, width // (4 * int(counts.max()))))
    num_groups = width // group
    if group > 1:
        values = xp.max(xp.reshape(values[:, : group * num_groups], (num_rows, group, num_groups)), axis=1)
    bound = _kth_largest(xp, values, counts)
    return xp.maximum(bound, xp.full_like(bound, -float(xp.finfo(xp.float32).max)))


def _kth_largest(xp: Any, values: Array, counts: NDArray[np.int64]) -> Array:
    """f32[r, 1]; the one operation that numpy and torch spell differently."""
    if not is_numpy(values):
        best = values.topk(int(counts.max()), dim=-1).values
        return xp.take_along_axis(best, xp.asarray(counts - 1, device=device(values))[:, None], axis=-1)
    splits = values.shape[1] - counts
    parted = np.partition(values, np.unique(splits), axis=-1)
    return np.take_along_axis(parted, splits[:, None], axis=-1)


def draw(weights: Array, noise: NDArray[np.float64]) -> Array:
    """i64[r]: the first index at which the running sum of i64[r, n] weights exceeds noise times their total.

    noise: f64[r] in [0, 1), on the host. Indices of weight 0 are never drawn; rows without any weight give an arbitrary
    index. A long row is searched by sums of blocks first and then inside one, which gives the same index in less time.
    """
    xp, where = array_namespace(weights), device(weights)
    width = weights.shape[-1]
    if width <= 8 * _BLOCK:
        running = xp.cumulative_sum(weights, axis=-1)
        target = _target(xp, running[:, -1:], noise)
        return xp.clip(xp.count_nonzero(running <= target, axis=-1), 0, width - 1)
    num_blocks = width // _BLOCK
    whole = num_blocks * _BLOCK
    sums = [xp.sum(xp.reshape(weights[:, :whole], (weights.shape[0], num_blocks, _BLOCK)), axis=-1)]
    if whole < width:
        sums.append(xp.sum(weights[:, whole:], axis=-1, keepdims=True))
    block_sums = xp.concat(sums, axis=-1)
    running = xp.cumulative_sum(block_sums, axis=-1)
    target = _target(xp, running[:, -1:], noise)
    block = xp.clip(xp.count_nonzero(running <= target, axis=-1), 0, block_sums.shape[-1] - 1)[:, None]
    before = xp.take_along_axis(running - block_sums, block, axis=-1)
    index = block * _BLOCK + xp.arange(_BLOCK, device=where)
    inside = xp.take_along_axis(weights, xp.clip(index, 0, width - 1), axis=-1)  # the end of the row is not passed
    steps = xp.count_nonzero(xp.cumulative_sum(inside, axis=-1) + before <= target, axis=-1)
    return xp.clip(block[:, 0] * _BLOCK + steps, 0, width - 1)


def _target(xp: Any, total: Array, noise: NDArray[np.float64]) -> Array:
    """i64[r, 1] below the total: the product alone may round up to it."""
    share = xp.asarray(noise[:, None], device=device(total)) * xp.astype(total, xp.float64)
    return xp.minimum(xp.astype(share, xp.int64), total - 1)


# -- noise -----------------------------------------------------------------------------------------------------------


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64: a bijection in which every input bit changes about half of the output bits."""
    state = (state ^ (state >> np.uint64(30))) * _FIRST
    state = (state ^ (state >> np.uint64(27))) * _SECOND
    return state ^ (state >> np.uint64(31))


def _unsigned(value: Any) -> NDArray[np.uint64]:
    """Integers of either sign modulo 2**64, at least one-dimensional (numpy warns of overflow in scalars only)."""
    if isinstance(value, int):
        return np.array([value & _MASK], dtype=np.uint64)
    return np.atleast_1d(np.asarray(value)).astype(np.uint64)


def random_bits(seed: Any, position: Any, stream: int = STREAM_DRAW) -> NDArray[np.uint64]:
    """u64[r]: 64 random bits for each (seed, position); the arguments are integers or arrays that broadcast."""
    state = _mix(_unsigned(seed) + _GOLDEN)
    state = _mix((state ^ _unsigned(position)) + _GOLDEN)
    return _mix((state ^ _unsigned(stream)) + _GOLDEN)


def uniform(seed: Any, position: Any, stream: int = STREAM_DRAW) -> NDArray[np.float64]:
    """f64[r] in [0, 1): multiples of 2**-53, one for each (seed, position)."""
    return (random_bits(seed, position, stream) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def child_seed(seed: int, index: int) -> int:
    """The seed of completion number `index` of a request; the first keeps the request's own."""
    return seed & _MASK if index == 0 else int(random_bits(seed, index, STREAM_CHILD)[0])
