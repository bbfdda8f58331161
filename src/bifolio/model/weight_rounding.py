"""Dense models whose layers a GPU stores in FP8: `quantization="fp8"`.

The matrices of attention, of plain MLPs and of recurrent layers become FP8 when the kernel set takes them, with a scale
for each row. Embedding, head, norms, experts and their routers stay as they are, as do matrices that a file holds
quantised.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from bifolio.errors import ConfigError
from bifolio.kernels.interface import KernelSet, Linear
from bifolio.model.loaded import LoadedModel
from bifolio.model.weights import LayerWeights
from bifolio.quant.convert import DENSE_FORMATS
from bifolio.quant.fp8 import DenseToFp8
from bifolio.quant.tensor import QuantizedTensor

FP8 = "fp8"


def rounded_model(model: LoadedModel, quantization: str | None, kernels: KernelSet) -> LoadedModel:
    """The model whose dense layers are stored in FP8, or the model as it is without a `quantization`."""
    if quantization is None:
        return model
    if quantization != FP8:
        raise ConfigError(f"quantization is {FP8!r} or None, not {quantization!r}: other formats follow from the file")
    if not kernels.stores_fp8:
        raise ConfigError(
            f"quantization={FP8!r} needs the kernels of a GPU, not {kernels.name!r} on {kernels.device!r}: "
            "on a CPU write a file with `bifolio quantize --format q8_0`"
        )
    layers = tuple(map(_rounded_layer, model.weights.layers))
    digest = partial(_marked, model.later_digest())
    return replace(model, weights=replace(model.weights, layers=layers), digest_source=digest)


def _marked(digest: Callable[[], bytes]) -> bytes:
    """Another digest than that of the dense model: blocks of one are no blocks of the other."""
    return digest() + FP8.encode()


def _rounded_layer(layer: LayerWeights) -> LayerWeights:
    recurrent = layer.recurrent
    if recurrent is not None:
        recurrent = replace(recurrent, input=_rounded(recurrent.input), output=_rounded(recurrent.output))
    return replace(
        layer,
        qkv=_rounded(layer.qkv),
        output=_rounded(layer.output),
        up=_rounded(layer.up),
        down=_rounded(layer.down),
        recurrent=recurrent,
    )


def _rounded(linear: Linear) -> Linear:
    parts = [part for part in linear.parts if isinstance(part, QuantizedTensor) and part.format in DENSE_FORMATS]
    if not parts or len(parts) != len(linear.parts) or any(type(part) is not QuantizedTensor for part in parts):
        return linear
    return replace(linear, parts=tuple(map(DenseToFp8, parts)))
