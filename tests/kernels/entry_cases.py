"""Cases of compressed entries and of streams that are mixed by the token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from attention_cases import DECODE, PREFILL
from case_table import Outputs, activations, case, normal, segment_over
from network_cases import new_norm

from bifolio.kernels.entries import write_rows
from bifolio.kernels.interface import (
    AttentionPhase,
    AttentionShape,
    Batch,
    Compressor,
    KernelSet,
    Router,
    Routing,
    StreamMix,
)
from bifolio.kernels.storage import CacheLayout, KVStorage

STREAMS, SIZE, TOKENS, BLOCK = 4, 32, 3, 4
LENGTHS = [37, 8, 2]
FIRST = [30, 3, 1]  # tokens of the first pass
HALF = 4  # pairs of dimensions that are rotated
HEADS, TOP_K = 3, 5


class Passes(NamedTuple):
    """Sequences in a cache of keys, rows and entries, and passes over them: two with the cache, and one without."""

    storage: KVStorage
    batches: list[tuple[Batch, KVStorage | None]]


def passes(kernels: KernelSet, columns: int) -> Passes:
    counts = [-(-length // BLOCK) for length in LENGTHS]
    heads = (1, SIZE), (1, 2 * columns), (1, SIZE)
    layout = CacheLayout(3, 1 + sum(counts), BLOCK, 1, SIZE, kernels.kv_dtype, True, True, heads=heads)
    tables = np.zeros((len(LENGTHS), max(counts)), np.int32)
    ends = np.cumsum(counts)
    for row, (end, count) in enumerate(zip(ends, counts, strict=True)):
        tables[row, :count] = 1 + np.arange(end - count, end)[::-1]
    storage = kernels.new_storage(layout)
    second = [length - first for length, first in zip(LENGTHS, FIRST, strict=True)]
    batches: list[tuple[Batch, KVStorage | None]] = [
        (batch(kernels, PREFILL, FIRST, FIRST, tables), storage),
        (batch(kernels, DECODE, second, LENGTHS, tables), storage),
        (batch(kernels, PREFILL, LENGTHS, LENGTHS, None), None),
    ]
    return Passes(storage, batches)


def batch(
    kernels: KernelSet, phase: AttentionPhase, counts: list[int], lengths: list[int], tables: np.ndarray | None
) -> Batch:
    """The last `counts` tokens of sequences of these lengths."""
    positions = [np.arange(length - count, length) for count, length in zip(counts, lengths, strict=True)]
    index = None
    if tables is not None:
        slots = [table[own // BLOCK] * BLOCK + own % BLOCK for table, own in zip(tables, positions, strict=True)]
        index = kernels.from_host(np.concatenate(slots).astype(np.int64))
    flat = kernels.from_host(np.concatenate(positions).astype(np.int32))
    return Batch(flat, flat, index, (segment_over(kernels, phase, counts, lengths, tables),), None)


def compressor(kernels: KernelSet, rng: np.random.Generator, *, overlaps: bool) -> Compressor:
    norm, columns = kernels.prepare_norm(new_norm(rng, SIZE)), SIZE * (2 if overlaps else 1)
    frequencies = kernels.from_host((1e2 ** -(np.arange(HALF) / HALF)).astype(np.float32))
    return Compressor(1, TOKENS, SIZE, overlaps, kernels.from_host(normal(rng, TOKENS, columns)), norm, frequencies)


def rotation_of(kernels: KernelSet, given: Batch) -> Any:
    return kernels.rotation(kernels.from_host(np.linspace(0.1, 1, HALF).astype(np.float32)), 1.0, given.positions)


@case("stream_weights")
def stream_weights(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    """Around a part of a layer, and at the end of the network."""
    found = []
    for width, count in (((2 + STREAMS) * STREAMS, 3), (STREAMS, 1)):
        base, scale = (kernels.from_host(normal(rng, size)) for size in (width, count))
        logits = activations(kernels, normal(rng, 5, width))
        found.append(kernels.to_host(kernels.stream_weights(logits, StreamMix(STREAMS, base, scale, 20, 1e-6))))
    mixing = found[0][:, 2 * STREAMS :].reshape(5, STREAMS, STREAMS)
    np.testing.assert_allclose(mixing.sum(axis=1), 1, atol=1e-2)
    np.testing.assert_allclose(mixing.sum(axis=2), 1, atol=1e-2)
    return tuple(found)


@case("turn_ends")
def turn_ends(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    """Rotated, and rotated back: the first is the reverse of the second."""
    (given, _), *_ = passes(kernels, SIZE).batches
    x = normal(rng, sum(FIRST), HEADS * SIZE)
    rotation = rotation_of(kernels, given)
    turned = kernels.turn_ends(activations(kernels, x), rotation, SIZE)
    back = kernels.to_host(kernels.turn_ends(turned, rotation, SIZE, back=True))
    np.testing.assert_allclose(back, x, atol=5e-2)
    return kernels.to_host(turned), back


@case("compress")
def compress(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    """Entries of two passes, the second of which closes runs of the first, and of all tokens without a cache."""
    found = []
    for overlaps in (False, True):
        own = compressor(kernels, rng, overlaps=overlaps)
        columns = own.columns
        for given, storage in passes(kernels, columns).batches:
            rows = activations(kernels, normal(rng, len(given.positions), 2 * columns))
            found.append(kernels.to_host(kernels.compress(rows, own, given, storage)))
    return tuple(found)


def with_entries(kernels: KernelSet, rng: np.random.Generator, own: Compressor) -> list[tuple[Batch, Any, Any]]:
    """(batch, storage, entries of its tokens) of all passes, with random entries and keys in the cache."""
    made, found = passes(kernels, SIZE), []
    for given, storage in made.batches:
        entries = activations(kernels, normal(rng, len(given.positions), SIZE))
        write_rows(entries, own.layer + 1, given, storage)
        found.append((given, storage, entries))
    return found


@case("choose_entries")
def choose_entries(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    own, found = compressor(kernels, rng, overlaps=False), []
    shape = AttentionShape(2, HEADS, 1, SIZE, 0.3, top_k=TOP_K)
    for given, storage, entries in with_entries(kernels, rng, own):
        count = len(given.positions)
        query, weights = (activations(kernels, normal(rng, count, width)) for width in (HEADS * SIZE, HEADS))
        found.append(kernels.to_host(kernels.choose_entries(query, weights, entries, own, shape, given, storage)))
        few = (kernels.to_host(given.positions) + 1) // TOKENS <= TOP_K
        assert ((found[-1] == -1).all(axis=1) == few).all()
    return tuple(found)


@case("attend_entries")
def attend_entries(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    """All entries, chosen ones, and none; queries that see no entry are among them."""
    own, found = compressor(kernels, rng, overlaps=False), []
    sinks = kernels.from_host(np.linspace(-2, 1, HEADS).astype(np.float32))
    shape = AttentionShape(0, HEADS, 1, SIZE, 0.2, window=7, sinks=sinks, has_entries=True)
    for kind in ("all", "chosen", "none"):
        for given, storage, entries in with_entries(kernels, rng, own):
            count = len(given.positions)
            query, key = (activations(kernels, normal(rng, count, width)) for width in (HEADS * SIZE, SIZE))
            rows = [
                np.sort(rng.permutation(seen)[:TOP_K]) if seen > TOP_K else np.full(TOP_K, -1)
                for seen in (kernels.to_host(given.positions) + 1) // TOKENS
            ]
            chosen = kernels.from_host(np.stack(rows).astype(np.int32)) if kind == "chosen" else None
            some, compressed = (None, None) if kind == "none" else (entries, own)
            mixed = kernels.attend_entries(query, key, some, chosen, compressed, shape, given, storage)
            found.append(kernels.to_host(mixed))
    return tuple(found)


@case("take_identities")
def take_identities(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    """Tokens with several experts that return their input, and without."""
    experts, weights = np.array([[0, 5, 7], [1, 2, 3], [6, 4, 5]], np.int32), np.abs(normal(rng, 3, 3))
    x = activations(kernels, normal(rng, 3, 20))
    routing = Routing(kernels.from_host(experts), kernels.from_host(weights))
    kept, identities = kernels.take_identities(x, routing, 5)
    found = tuple(map(kernels.to_host, (kept.experts, kept.weights, identities)))
    np.testing.assert_array_equal(found[0], np.where(experts < 5, experts, 0))
    np.testing.assert_array_equal(found[1], np.where(experts < 5, weights, 0))
    share = np.where(experts < 5, 0, weights).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(found[2], kernels.to_host(x) * share, rtol=1e-2)
    return found


@case("route_by_token")
def route_by_token(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    found = []
    table = np.stack([rng.permutation(9)[:3] for _ in range(20)]).astype(np.int32)
    ids = rng.integers(0, 20, 6).astype(np.int32)
    for router in (Router(3, "sqrt_softplus", True, 1.5), Router(3, "sigmoid"), Router(3, scale=0.5)):
        logits = activations(kernels, normal(rng, 6, 9))
        routing = kernels.route_by_token(logits, router, kernels.from_host(table), kernels.from_host(ids))
        found += [kernels.to_host(routing.experts), kernels.to_host(routing.weights)]
        np.testing.assert_array_equal(found[-2], table[ids])
    return tuple(found)


@case("route", "by roots of softplus")
def route_by_roots(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    """Logits far from each other, of either sign."""
    router = Router(3, "sqrt_softplus", True, 1.5, kernels.from_host(normal(rng, 9)))
    found = []
    for rows in (1, 6):
        logits = 30 * np.stack([rng.permutation(np.linspace(-1, 1, 9)) for _ in range(rows)]).astype(np.float32)
        for own in (router, replace(router, bias=None, renormalise=False)):
            routing = kernels.route(kernels.from_host(logits), own)
            found += [kernels.to_host(routing.experts), kernels.to_host(routing.weights)]
    return tuple(found)


@case("act_mul", "clamped")
def act_mul_clamped(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    """Values on both sides of the limits."""
    x = activations(kernels, normal(rng, 5, 2 * 80, scale=12.0))
    return (kernels.to_host(kernels.act_mul(x, "silu_clamped")),)
