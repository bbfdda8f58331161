"""One valid call of every entry point of the native module; the tests of misuse change one argument of it."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from native_choice_calls import CHOICE_CALLS
from native_recurrence_calls import CALLS as RECURRENCE_CALLS
from native_stream_calls import STREAM_CALLS

from bifolio.kernels import native
from bifolio.kernels.native.formats import grid_rows
from bifolio.quant import QuantFormat

TOKENS, WIDTH, VOCAB = 6, 64, 50
HEADS, KV_HEADS, DIM = 4, 2, 32
QKV_WIDTH = (HEADS + 2 * KV_HEADS) * DIM
LAYERS, BLOCKS, BLOCK_SIZE = 2, 5, 16
EXPERTS = 5
Arguments = dict[str, Any]


def floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def longs(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def norm(size: int = WIDTH) -> Any:
    return native.library().Norm(floats(size), None, 1e-5, False)


def table(rows: int = VOCAB, width: int = WIDTH) -> Any:
    return native.library().Table(0, floats(rows, width).view(np.uint8), width)


def linear(n: int, k: int) -> Any:
    return native.library().make_linear([(0, floats(n, k).view(np.uint8))], k, None, 1)


def shape(heads: int = HEADS, kv_heads: int = KV_HEADS, dim: int = DIM) -> Any:
    return native.library().AttentionShape(heads, kv_heads, dim, 0.2, 0, False, None, None)


def windowed_shape() -> Any:
    return native.library().AttentionShape(HEADS, HEADS, DIM, 0.2, 8, False, None, None)


def kv_arrays(count: int = LAYERS) -> list[np.ndarray]:
    return [floats(BLOCKS, KV_HEADS, BLOCK_SIZE, DIM) for _ in range(count)]


def cache() -> Any:
    return native.library().Cache(kv_arrays(), kv_arrays(), 0, [DIM] * LAYERS)


def segment(**changes: Any) -> tuple[Any, ...]:
    """Two sequences of one and five tokens with contexts of 20 and 10."""
    fields = {
        "phase": 0,
        "token_start": 0,
        "query_starts": ints(0, 1, TOKENS),
        "context_lens": ints(20, 10),
        "block_tables": np.array([[1, 2], [3, 0]], np.int32),
        "causal": True,
    }
    return tuple((fields | changes).values())


def router(num_experts: int = EXPERTS, top_k: int = 2) -> Any:
    return native.library().Router(num_experts, top_k, False, True, 1.0, None, 1, 1, 1)


def experts(count: int = EXPERTS, width: int = WIDTH) -> Any:
    up, down = [linear(96, width) for _ in range(count)], [linear(width, 48) for _ in range(count)]
    return native.library().Experts(up, down, 0)


def expert_call(**changes: Any) -> Arguments:
    room, rows = native.library().HostRoom(), np.concatenate([floats(TOKENS, WIDTH), routing()], axis=1)
    return {"experts": experts(), "room": room, "inputs": rows, "outputs": floats(TOKENS, WIDTH)} | changes


def routing(expert: int = EXPERTS - 1) -> np.ndarray:
    """The last expert first, then expert 0, for every token."""
    chosen = np.tile(np.array([[expert, 0]], np.int32), (TOKENS, 1)).view(np.float32)
    return np.concatenate([chosen, np.full((TOKENS, 2), 0.5, np.float32)], axis=1)


def heads(count: int = HEADS) -> Any:
    return native.library().Heads([linear(8, 12) for _ in range(count)])


def routed() -> Arguments:
    """A program with logits of all experts, and their routing."""
    open_program = recorded()
    logits = open_program.program.linear(open_program.x, linear(EXPERTS, WIDTH))
    chosen = open_program.program.route(logits, router())
    return {"self": open_program.program, "x": open_program.x, "routing": chosen, "experts": experts()}


def gated() -> Arguments:
    program, x = recorded()[:2]
    return {"self": program, "x": x, "logits": program.linear(x, linear(1, WIDTH))}


def joined() -> Arguments:
    """A program with the rows of 4 heads of 12 + 4 dimensions, and latents of 16."""
    program, x = recorded()[:2]
    widths = {"query": HEADS * 16, "absorbed": HEADS * 16, "latent": 20}
    rows = {name: program.linear(x, linear(width, WIDTH)) for name, width in widths.items()}
    return {"self": program, **rows, "norm": norm(16), "rope": 4}


def strings(*texts: str) -> tuple[np.ndarray, np.ndarray]:
    """u8[bytes], each text behind its length, and u64[texts], where they begin."""
    encoded = [len(text.encode()).to_bytes(8, "little") + text.encode() for text in texts]
    starts = np.cumsum([0, *map(len, encoded)], dtype=np.uint64)
    return np.frombuffer(b"".join(encoded), np.uint8).copy(), starts[:-1]


def codec(by_score: bool = True) -> Any:
    found = native.library().Codec(*strings("a", "b", "ab", "<s>", "a b"), ints(1, 1, 1, 3, 1))
    if by_score:
        found.set_order(ints(2, 0, 1), False)
    else:
        found.set_merges(np.array([39], np.uint64), False)
    return found


class Recorded(NamedTuple):
    """A program that is still open, and some of its registers."""

    program: Any
    x: int  # WIDTH wide
    odd: int  # 33 wide
    qkv: int
    cosine: int
    sine: int
    taken: int  # WIDTH wide, one row for each logit row


def recorded() -> Recorded:
    program = native.library().Program()
    x = program.embed(table(), 1.0, 0)
    odd = program.embed(table(width=33), 1.0, 1)
    qkv = program.linear(x, linear(QKV_WIDTH, WIDTH))
    cosine, sine = program.rotation(floats(DIM // 2), 1.0)
    return Recorded(program, x, odd, qkv, cosine, sine, program.take(x))


def complete(layer: int = 0, heads: int = HEADS, kv_heads: int = KV_HEADS, dim: int = DIM) -> Any:
    """A program of one layer of attention."""
    program, x, _, qkv, cosine, sine, _ = recorded()
    rotation = (cosine, sine) if dim == DIM else (-1, -1)
    qkv = program.rope_and_write(qkv, *rotation, layer, shape(heads, kv_heads, dim))
    mixed = program.linear(program.attend(qkv, layer, shape(heads, kv_heads, dim)), linear(WIDTH, heads * dim))
    program.finish([program.logits(program.take(program.add(x, mixed)), linear(VOCAB, WIDTH), 0.0)])
    return program


def tapped() -> Any:
    """A program that reads given rows, 8 wide, and taps them at column 2."""
    program = native.library().Program()
    rows = program.given(8)
    program.tap(rows, 2)
    program.finish([program.logits(program.take(rows), linear(VOCAB, 8), 0.0)])
    return program


def mixing() -> Any:
    """A program that mixes experts of given rows by a given routing."""
    program = native.library().Program()
    program.finish([program.mix_experts(program.given(WIDTH), program.given(4), experts())])
    return program


def mixed(**changes: Any) -> Arguments:
    """Arguments that run it, in place of those of a whole network."""
    nothing = dict.fromkeys(("cache", "ids", "positions", "slots", "logit_rows")) | {"segments": []}
    rows = {"given": [floats(TOKENS, WIDTH), routing()], "results": [floats(TOKENS, WIDTH)]}
    return {"self": mixing()} | nothing | rows | changes


def recording(**arguments: str | Any) -> Arguments:
    """Arguments of a recording method; a string names a register of the program."""
    open_program = recorded()
    known = {k: getattr(open_program, v) if isinstance(v, str) else v for k, v in arguments.items()}
    return {"self": open_program.program} | known


def run_arguments() -> Arguments:
    return {
        "self": complete(),
        "cache": cache(),
        "ids": ints(1, 2, 3, 4, 5, 6),
        "positions": ints(19, 5, 6, 7, 8, 9),
        "slots": longs(35, 53, 54, 55, 56, 57),
        "logit_rows": ints(0, 5),
        "segments": [segment()],
        "share": True,
        "results": [floats(2, VOCAB)],
    }


def ranks() -> Any:
    """One rank: its exchanges end at once."""
    return native.library().Ranks(rank_memory(), 0, 1)


def rank_memory() -> np.ndarray:
    """Bytes on a border of pages."""
    size = native.library().rank_memory_bytes(1)
    return np.frombuffer(mmap.mmap(-1, size), np.uint8)


VALID: dict[str, Callable[[], Arguments]] = {
    "weights": lambda: {
        "x": floats(TOKENS, WIDTH),
        "highest": floats(TOKENS),
        "warmth": floats(TOKENS),
        "out": np.zeros((TOKENS, WIDTH), np.int64),
    },
    "make_linear": lambda: {
        "parts": [(0, floats(48, WIDTH).view(np.uint8)), (0, floats(16, WIDTH).view(np.uint8))],
        "k": WIDTH,
        "bias": floats(64),
        "planes": 1,
    },
    "join_pairs": lambda: {"tokens": ["a", "b", "ab"], "order": ints(2, 1, 0)},
    "string_starts": lambda: {"bytes": strings("a", "b")[0], "position": 0, "out": np.zeros(2, np.uint64)},
    "Codec": lambda: {**dict(zip(("bytes", "starts"), strings("a", "b"), strict=True)), "types": ints(1, 1)},
    "Codec.set_order": lambda: {"self": codec(), "order": ints(1, 0), "add_space": True},
    "Codec.set_merges": lambda: {"self": codec(), "merges": np.array([39, 39], np.uint64), "whole_words": True},
    "Codec.encode_texts": lambda: {"self": codec(), "texts": ["ab<s>"]},
    "Codec.encode_words": lambda: {"self": codec(by_score=False), "words": ["ab"]},
    "Codec.cut_at_added": lambda: {"self": codec(), "text": "ab<s>"},
    "Codec.decode": lambda: {"self": codec(), "ids": [0, 1], "skip_special": True},
    "Codec.find": lambda: {"self": codec(), "text": "ab"},
    "file_formats": dict,
    "needs_grid": lambda: {"format": 10},
    "packed_bytes": lambda: {"format": 10, "n": 20, "k": 512},
    "set_grid": lambda: {"format": 19, "bytes": grid_rows(QuantFormat.IQ2_XXS)},
    "decode_fp8": lambda: {
        "bytes": np.zeros((5, 7), np.uint8),
        "scales": floats(2, 2),
        "height": 3,
        "width": 4,
        "out": np.zeros((5, 14), np.uint8),
    },
    "resample": lambda: {
        "pixels": np.zeros((4, 5, 3), np.uint8),
        "row_first": ints(0, 2),
        "row_count": ints(2, 2),
        "row_weights": np.full((2, 3), 1 << 21, np.int32),
        "column_first": ints(0, 1, 2),
        "column_count": ints(1, 1, 3),
        "column_weights": np.full((3, 3), 1 << 20, np.int32),
        "out": np.zeros((2, 3, 3), np.uint8),
    },
    "checksum": lambda: {"bytes": np.zeros(100, np.uint8), "out": np.zeros(8, np.uint64)},
    "pack_codes": lambda: {
        "order": 1,
        "bytes": np.zeros((8, 20), np.uint8),
        "headers": np.zeros((5, 4), np.uint8),
        "header_bytes": 2,
        "out": np.zeros((5, 36), np.uint8),
    },
    "dequantize": lambda: {"format": 10, "bytes": np.zeros((3, 288), np.uint8), "width": 512, "out": floats(3, 512)},
    "encode": lambda: {
        "format": 10,
        "x": floats(3, 512),
        "importance": np.abs(floats(512)),
        "bytes": np.zeros((3, 288), np.uint8),
    },
    "Norm": lambda: {"weight": floats(WIDTH), "bias": floats(WIDTH), "eps": 1e-5, "centered": True},
    "Table": lambda: {"format": 0, "bytes": floats(VOCAB, WIDTH).view(np.uint8), "width": WIDTH},
    "Cache": lambda: {"keys": kv_arrays(), "values": kv_arrays(), "kv_type": 0, "head_dims": [DIM] * LAYERS},
    "AttentionShape": lambda: {
        "heads": HEADS,
        "kv_heads": KV_HEADS,
        "head_dim": DIM,
        "scale": 0.2,
        "window": 0,
        "interleaved": False,
        "query_norm": norm(DIM),
        "key_norm": norm(DIM),
    },
    "rank_memory_bytes": lambda: {"size": 2},
    "Ranks": lambda: {"memory": rank_memory(), "rank": 0, "size": 1},
    "Ranks.gather": lambda: {"self": ranks(), "x": floats(3, 8), "widths": [8], "out": floats(3, 8)},
    "Ranks.reduce": lambda: {"self": ranks(), "x": floats(3, 8)},
    "Ranks.post": lambda: {"self": ranks(), "signal": 0, "value": 1},
    "Ranks.read": lambda: {"self": ranks(), "signal": 0},
    "Ranks.wait": lambda: {"self": ranks(), "signal": 0, "value": 0, "seconds": 0.0},
    "AttentionShape.with_slopes": lambda: {"self": shape(), "slopes": floats(HEADS)},
    "AttentionShape.of_chunks": lambda: {"self": windowed_shape()},
    "AttentionShape.counting_from": lambda: {"self": shape(), "start": 1},
    "AttentionShape.with_sinks": lambda: {"self": shape(), "sinks": floats(HEADS)},
    "AttentionShape.both_ways": lambda: {"self": shape()},
    "AttentionShape.of_earlier": lambda: {"self": shape()},
    "AttentionShape.with_bias": lambda: {"self": shape(), "bias": floats(HEADS, 9)},
    "Router": lambda: {
        "num_experts": EXPERTS,
        "top_k": 2,
        "sigmoid": True,
        "renormalise": True,
        "scale": 1.0,
        "bias": floats(EXPERTS),
        "num_groups": 1,
        "top_groups": 1,
        "group_best": 1,
    },
    "Experts": lambda: {"up": [linear(96, WIDTH)] * 2, "down": [linear(WIDTH, 48)] * 2, "activation": 4},
    "HostRoom": dict,
    "ExpertCall": expert_call,
    "ExpertCall.run": lambda: {"self": native.library().ExpertCall(**expert_call())},
    "Heads": lambda: {"linears": [linear(8, 12), linear(8, 12)]},
    **CHOICE_CALLS,
    **RECURRENCE_CALLS,
    **STREAM_CALLS,
    "Program": dict,
    "Program.embed": lambda: recording(table=table(), scale=1.0, source=0),
    "Program.norm": lambda: recording(x="x", weights=norm()),
    "Program.add": lambda: recording(x="x", y="x"),
    "Program.add_norm": lambda: recording(x="x", delta="x", weights=norm()),
    "Program.linear": lambda: recording(x="x", weights=linear(48, WIDTH)),
    "Program.rotation": lambda: recording(frequencies=floats(16), scale=1.0),
    "Program.rope_and_write": lambda: recording(qkv="qkv", cosine="cosine", sine="sine", layer=0, shape=shape()),
    "Program.attend": lambda: recording(query="qkv", layer=0, shape=shape()),
    "Program.act": lambda: recording(x="odd", activation=1),
    "Program.clamp": lambda: recording(x="x", least=np.zeros(WIDTH, np.float32), most=np.ones(WIDTH, np.float32)),
    "Program.xielu": lambda: recording(x="x", positive=0.8, negative=1.3, linear=0.5, most=-1e-6),
    "Program.act_mul": lambda: recording(x="x", activation=1),
    "Program.all_gather": lambda: recording(x="x", ranks=ranks(), widths=[WIDTH]),
    "Program.all_reduce": lambda: recording(x="x", ranks=ranks()),
    "Program.join_columns": lambda: (
        own := recording(x="x"),
        {"self": own["self"], "parts": [own["x"], own["x"]], "starts": [0, 8], "stops": [4, WIDTH]},
    )[1],
    "Program.gate": gated,
    "Program.route": lambda: {"self": (own := routed())["self"], "logits": own["routing"] - 1, "router": router()},
    "Program.mix_experts": routed,
    "Adapter": lambda: {
        "products": [(3, 0, linear(8, WIDTH), linear(48, 8))],
        "experts": [(5, 1, 0, 16, linear(4, WIDTH), linear(16, 4))],
        "embedding": [(table(), None), (table(VOCAB, 8), table(8, WIDTH))],
    },
    "Program.adapt": lambda: recording(y="qkv", x="x", site=3),
    "Program.adapt_embedding": lambda: recording(x="x", scale=2.0),
    "Program.head_linear": lambda: recording(x="x", heads=heads(), start=4),
    "Program.join_latent": joined,
    "Program.width": lambda: recording(x="x"),
    "Program.of_logit_rows": lambda: recording(x="x"),
    "Program.take": lambda: recording(x="x"),
    "Program.given": lambda: recording(width=24),
    "Program.tap": lambda: recording(x="x", column=8),
    "Program.logits": lambda: recording(x="taken", head=linear(VOCAB, WIDTH), softcap=30.0),
    "Program.finish": lambda: (own := recording(x="x"), {"self": own["self"], "results": [own["x"]]})[1],
    "Program.run": run_arguments,
    "set_isa": lambda: {"name": ""},
    "Pool": lambda: {"count": 2},
    "set_num_threads": lambda: {"count": 0},
    "read_bandwidth": lambda: {"bytes": 1 << 20},
    "product_rate": lambda: {"bytes": True},
    "isa": dict,
    "available_isas": dict,
    "num_threads": dict,
    "shared_tokens": dict,
}


def call(entry: str, arguments: Arguments) -> Any:
    rest = dict(arguments)
    if "self" in rest:
        return getattr(rest.pop("self"), entry.partition(".")[2])(**rest)
    return attrgetter(entry)(native.library())(**rest)


def arrays_in(value: Any) -> list[np.ndarray]:
    """All arrays among the arguments, also those in lists and tuples."""
    if isinstance(value, np.ndarray):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [array for item in value for array in arrays_in(item)] if isinstance(value, list | tuple) else []
