"""The encoder of SigLIP: patches with learned positions, layer norms, and a norm at the end."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from bifolio.kernels.interface import Array, AttentionShape, Batch, KernelSet, Linear, Norm
from bifolio.model.huggingface.json_object import JsonObject
from bifolio.model.vision.layers import TowerLayer
from bifolio.model.vision.tensors import TowerTensors
from bifolio.quant.tensor import QuantizedTensor

ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}


class SiglipSizes(NamedTuple):
    """The sizes of an encoder."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    image_size: int
    patch_size: int
    eps: float
    activation: str

    @classmethod
    def read(cls, json: JsonObject) -> SiglipSizes:
        """The sizes in `vision_config`."""
        name = json.text("hidden_act", "gelu_pytorch_tanh")
        if name not in ACTIVATIONS:
            raise json.wrong("hidden_act", "gelu_pytorch_tanh or gelu")
        sizes = cls(
            json.count("hidden_size", 768, most=1 << 16),
            json.count("intermediate_size", 3072, most=1 << 20),
            json.count("num_hidden_layers", 12, most=1024),
            json.count("num_attention_heads", 12, most=1024),
            json.count("image_size", 224, most=1 << 14),
            json.count("patch_size", 16, most=1 << 10),
            json.number("layer_norm_eps", 1e-6),
            ACTIVATIONS[name],
        )
        if sizes.hidden_size % sizes.num_heads or sizes.patch_size > sizes.image_size:
            raise json.wrong("num_attention_heads", "a divisor of hidden_size, and patch_size at most image_size")
        return sizes

    @property
    def side(self) -> int:
        """Patches of an edge."""
        return self.image_size // self.patch_size


@dataclass(frozen=True, slots=True)
class Siglip:
    """The weights of an encoder."""

    sizes: SiglipSizes
    patches: Linear  # [d, 3 * patch * patch]
    positions: Array  # f32[patches, d]
    layers: tuple[TowerLayer, ...]
    norm: Norm

    @classmethod
    def load(cls, tensors: TowerTensors, sizes: SiglipSizes) -> Siglip:
        size, patch = sizes.hidden_size, sizes.patch_size
        name = "tower.embeddings.patch_embedding"
        return cls(
            sizes,
            tensors.patches(name, size, 3 * patch * patch, (size, 3, patch, patch)),
            tensors.array("tower.embeddings.position_embedding.weight", (sizes.side**2, size)),
            tuple(_layer(tensors, f"tower.encoder.layers.{number}.", sizes) for number in range(sizes.num_layers)),
            tensors.norm("tower.post_layernorm", size, sizes.eps, centered=True),
        )

    def prepared(self, kernels: KernelSet) -> Siglip:
        return replace(
            self,
            patches=kernels.prepare_linear(self.patches),
            positions=kernels.from_host(self.positions),
            layers=tuple(layer.prepared(kernels) for layer in self.layers),
            norm=kernels.prepare_norm(self.norm),
        )

    def states(self, values: Array, batch: Batch, kernels: KernelSet) -> Array:
        """The normed states of patches: [patches, d]."""
        x = kernels.add(kernels.linear(values, self.patches), self.positions)
        for layer in self.layers:
            x = layer(x, None, batch, kernels)
        return kernels.norm(x, self.norm)

    def matrices(self) -> list[QuantizedTensor | Array]:
        return [*self.patches.parts, self.positions, *(part for layer in self.layers for part in layer.matrices())]


def _layer(tensors: TowerTensors, name: str, sizes: SiglipSizes) -> TowerLayer:
    size, inner, heads = sizes.hidden_size, sizes.intermediate_size, sizes.num_heads
    head = size // heads
    attention = f"{name}self_attn."
    return TowerLayer(
        AttentionShape(0, heads, heads, head, head**-0.5),
        tensors.norm(f"{name}layer_norm1", size, sizes.eps, centered=True),
        tensors.linear(*(f"{attention}{part}_proj" for part in "qkv"), rows=size, columns=size),
        tensors.linear(f"{attention}out_proj", rows=size, columns=size),
        tensors.norm(f"{name}layer_norm2", size, sizes.eps, centered=True),
        tensors.linear(f"{name}mlp.fc1", rows=inner, columns=size),
        tensors.linear(f"{name}mlp.fc2", rows=size, columns=inner),
        sizes.activation,
    )
