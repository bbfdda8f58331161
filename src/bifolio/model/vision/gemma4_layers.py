"""The layers of Gemma 4's tower: their sizes, positions, and weights in the order of the kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bifolio.kernels.interface import Array, AttentionShape, KernelSet, Linear, Norm
from bifolio.model.huggingface.json_object import JsonObject
from bifolio.model.vision.layers import Bounds, Clipped, Product, TowerLayer
from bifolio.model.vision.tensors import TowerTensors

ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh"}


class Gemma4Sizes(NamedTuple):
    """The sizes of a tower; one without layers has those of the projection of patches."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    patch_size: int
    pool: int  # patches of an edge of a row's square
    places: int  # positions along each edge
    eps: float
    theta: float
    activation: str
    clipped: bool  # products have bounds
    standardised: bool  # pooled values are shifted and scaled

    @classmethod
    def read(cls, json: JsonObject) -> Gemma4Sizes:
        name = json.text("hidden_activation", "gelu_pytorch_tanh")
        if name not in ACTIVATIONS:
            raise json.wrong("hidden_activation", "gelu_pytorch_tanh")
        if json.flag("attention_bias", False):
            raise json.wrong("attention_bias", "false")
        heads = json.count("num_attention_heads", 12, most=1024)
        sizes = cls(
            json.count("hidden_size", 768, most=1 << 16),
            json.count("intermediate_size", 3072, most=1 << 20),
            json.count("num_hidden_layers", 16, most=1024),
            heads,
            json.count("num_key_value_heads", 12, most=1024),
            json.count("head_dim", 64, most=1 << 12),
            json.count("patch_size", 16, most=1 << 10),
            json.count("pooling_kernel_size", 3, most=64),
            json.count("position_embedding_size", 10240, most=1 << 20),
            json.number("rms_norm_eps", 1e-6),
            json.object("rope_parameters").number("rope_theta", 100.0),
            ACTIVATIONS[name],
            json.flag("use_clipped_linears", False),
            json.flag("standardize", False),
        )
        if sizes.head_dim % 4 or sizes.num_heads % sizes.num_kv_heads:
            raise json.wrong("head_dim", "a multiple of 4, and num_key_value_heads a divisor of num_attention_heads")
        return sizes

    @classmethod
    def read_unified(cls, json: JsonObject) -> Gemma4Sizes:
        width = json.count("mm_embed_dim", 3840, most=1 << 16)
        if json.count("output_proj_dims", 3840, most=1 << 16) != width:
            raise json.wrong("output_proj_dims", f"{width}, as mm_embed_dim")
        pool = json.count("pooling_kernel_size", 3, most=64)
        size = json.count("patch_size", 16, most=1 << 10) * pool
        places = json.count("mm_posemb_size", 1120, most=1 << 20)
        eps = json.number("rms_norm_eps", 1e-6)
        return cls(width, 0, 0, 1, 1, 4, size, 1, places, eps, 1.0, "", clipped=False, standardised=False)

    @property
    def square(self) -> int:
        """Pixels of an edge of a row's square."""
        return self.patch_size * self.pool


@dataclass(frozen=True, slots=True)
class Positions:
    """Two tables: a patch has the sum of the entries of its column and of its row."""

    by_column: Array  # f32[places, d]
    by_row: Array

    def prepared(self, kernels: KernelSet) -> Positions:
        return Positions(kernels.from_host(self.by_column), kernels.from_host(self.by_row))

    def added(self, x: Array, columns: Array, rows: Array, kernels: KernelSet) -> Array:
        """x with the positions of patches; columns and rows: i64[patches]."""
        for table, places in ((self.by_column, columns), (self.by_row, rows)):
            x = kernels.add(x, kernels.take(table, places))
        return x


def channels_first(patch_size: int) -> NDArray[np.int64]:
    """i64[3 * size * size]: the places of a patch's values, channel by channel, where files have a pixel's together."""
    places = np.arange(3 * patch_size**2).reshape(patch_size, patch_size, 3)
    return np.ascontiguousarray(places.transpose(2, 0, 1)).reshape(-1)


def halves_together(heads: int, head_dim: int) -> NDArray[np.int64]:
    """i64[heads * head_dim]: files rotate each half of a head; here the first parts of both come before the second."""
    places = np.arange(heads * head_dim).reshape(heads, 2, 2, head_dim // 4)
    return np.ascontiguousarray(places.transpose(0, 2, 1, 3)).reshape(-1)


def tower_layer(source: TowerTensors, name: str, sizes: Gemma4Sizes) -> TowerLayer:
    size, inner, dim = sizes.hidden_size, sizes.intermediate_size, sizes.head_dim
    heads, kv_heads, attention = sizes.num_heads, sizes.num_kv_heads, f"{name}self_attn."

    def norm(part: str) -> Norm:
        return source.norm(f"{name}{part}", size, sizes.eps)

    def head_norm(part: str) -> Norm:
        found = source.norm(f"{attention}{part}", dim, sizes.eps)
        return replace(found, weight=found.weight[halves_together(1, dim)])

    def product(*parts: str, rows: tuple[int, ...], columns: int, turned: int = 0) -> Product:
        return _product(source, [f"{name}{part}" for part in parts], rows, columns, sizes, turned)

    return TowerLayer(
        AttentionShape(
            0, heads, kv_heads, dim, 1.0,
            query_norm=head_norm("q_norm"),
            key_norm=head_norm("k_norm"),
            value_norm=Norm(np.ones(dim, np.float32), None, sizes.eps),
        ),
        norm("input_layernorm"),
        product(
            *(f"self_attn.{part}_proj" for part in "qkv"),
            rows=(heads * dim, kv_heads * dim, kv_heads * dim),
            columns=size,
            turned=2,
        ),
        product("self_attn.o_proj", rows=(size,), columns=heads * dim),
        norm("pre_feedforward_layernorm"),
        product("mlp.gate_proj", "mlp.up_proj", rows=(inner, inner), columns=size),
        product("mlp.down_proj", rows=(size,), columns=inner),
        sizes.activation,
        gated=True,
        post_attention_norm=norm("post_attention_layernorm"),
        post_mlp_norm=norm("post_feedforward_layernorm"),
    )  # fmt: skip


def _product(
    source: TowerTensors, names: list[str], rows: tuple[int, ...], columns: int, sizes: Gemma4Sizes, turned: int
) -> Product:
    """Matrices of one input; the first `turned` have the rows of heads that are rotated."""
    parts = []
    for number, (name, count) in enumerate(zip(names, rows, strict=True)):
        part = source.view(f"{name}.linear.weight", (count, columns))
        order = halves_together(count // sizes.head_dim, sizes.head_dim) if number < turned else None
        parts.append(part if order is None else part.select_rows(order))
    whole = Linear(tuple(parts), (None,) * len(parts))
    if not sizes.clipped:
        return whole
    inputs = [tuple(_bound(source, name, f"input_{side}") for side in ("min", "max")) for name in names]
    outputs = [[_bound(source, name, f"output_{side}") for name in names] for side in ("min", "max")]
    if np.isinf(inputs).all() and np.isinf(outputs).all():
        return whole
    linears = [whole] if len(set(inputs)) == 1 else [Linear((part,), (None,)) for part in parts]
    of_inputs = [Bounds(*(np.full(columns, bound, np.float32) for bound in pair)) for pair in inputs]
    least, most = (np.repeat(np.array(each, np.float32), rows) for each in outputs)
    return Clipped(tuple(zip(of_inputs, linears, strict=False)), Bounds(least, most))


def _bound(source: TowerTensors, name: str, which: str) -> float:
    return float(source.array(f"{name}.{which}", ()).reshape(-1)[0])
