"""The tensors of shared blocks that each use has for itself: their names in files, and weights by role."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bifolio.config import ModelConfig
from bifolio.kernels.interface import Array, Linear
from bifolio.model.fetch import Fetch, FetchVector
from bifolio.model.norm_tensors import stored_norm
from bifolio.model.shared_weights import AddedProducts, SharedUse
from bifolio.quant.tensor import QuantizedTensor


@dataclass(frozen=True, slots=True)
class SharedNames:
    """Names without `.weight`; added products have the prefix of the layer that the block is stored in."""

    norm: str  # with the prefix of that layer, too
    output: str  # with the prefix of the layer that uses the block
    added: tuple[str, ...]  # to q, k, v and the MLP, with {}: the number of the use


def assemble_shared_use(
    config: ModelConfig,
    names: SharedNames | None,
    layer: int,
    prefix: str,
    home: str,
    fetch: Fetch,
    vector: FetchVector,
) -> SharedUse | None:
    """The use of a block by a layer, whose names begin with `prefix`; those of the block begin with `home`."""
    own, d = config.shared_blocks, config.hidden_size
    if own is None or names is None or not config.layers[layer].attention:
        return None
    use = config.attention_layers.index(layer)

    def added(parts: tuple[str, ...], rows: tuple[int, ...], inputs: int) -> AddedProducts:
        found = [home + part.format(use) for part in parts]
        down = tuple(fetch(f"{name}.0.weight", (own.rank, inputs)) for name in found)
        up = (fetch(f"{name}.1.weight", (size, own.rank)) for name, size in zip(found, rows, strict=True))
        return AddedProducts(Linear(down, (None,) * len(down)), tuple(Linear((each,), (None,)) for each in up))

    heads = config.query_size, config.kv_size, config.kv_size
    width = config.intermediate_size * (2 if config.gated_mlp else 1)
    return SharedUse(
        stored_norm(config, home + names.norm, config.attention_inputs, vector),
        Linear((fetch(f"{prefix}{names.output}.weight", (d, d)),), (None,)),
        added(names.added[3:], (width,), d),
        added(names.added[:3], heads, config.attention_inputs) if own.adapts_attention else None,
    )


def shared_parts(
    config: ModelConfig, names: SharedNames, layer: int, prefix: str, home: str, own: SharedUse
) -> Iterator[tuple[str, QuantizedTensor | Array]]:
    """Names and values, as files store them."""
    use = config.attention_layers.index(layer)
    if prefix == home:
        yield home + names.norm + ".weight", own.norm.weight
    yield f"{prefix}{names.output}.weight", own.output.parts[0]
    for products, parts in ((own.qkv, names.added[:3]), (own.up, names.added[3:])):
        if products is None:
            continue
        for name, down, up in zip(parts, products.down.parts, products.up, strict=True):
            yield f"{home}{name.format(use)}.0.weight", down
            yield f"{home}{name.format(use)}.1.weight", up.parts[0]
