"""Dense models that are rounded while they are loaded: `quantization="q8_0"`, `"q4_0"` or `"fp8"`.

q8_0 and q4_0 give the matrices that a file of `bifolio quantize` in that format has; one whose rows are no multiple of
32 values stays as it is, and q4_0 leaves embedding and head 8 bits. FP8, on a GPU, rounds attention, plain MLPs and
recurrent layers, with a scale for each row. Norms, positions and matrices that choose experts or positions stay as they
are, as do matrices that a file holds quantised.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

from bifolio.errors import ConfigError
from bifolio.kernels.cpu import quickly_converted
from bifolio.kernels.interface import KernelSet, Linear, Norm
from bifolio.model.latent_weights import IndexWeights
from bifolio.model.loaded import LoadedModel
from bifolio.model.weights import LayerWeights, ModelWeights, MoeWeights
from bifolio.quant.convert import DENSE_FORMATS
from bifolio.quant.formats import QuantFormat
from bifolio.quant.fp8 import DenseToFp8
from bifolio.quant.rounded import RoundedTensor
from bifolio.quant.tensor import QuantizedTensor

FP8 = "fp8"
BLOCK_FORMATS = {"q8_0": QuantFormat.Q8_0, "q4_0": QuantFormat.Q4_0}
OF_VOCABULARY = QuantFormat.Q8_0  # embedding and head, in either format
DENSE_PARTS = ((MoeWeights, "router"), (IndexWeights, "weights"))  # small matrices that choose, dense in files, too
Change = Callable[[Linear], Linear]


def rounded_model(model: LoadedModel, quantization: str | None, kernels: KernelSet) -> LoadedModel:
    """The model whose dense matrices are rounded when the kernel set takes them; as it is without a `quantization`."""
    if quantization is None:
        return model
    if quantization == FP8:
        if not kernels.stores_fp8:
            raise ConfigError(
                f"quantization={FP8!r} needs the kernels of a GPU, not {kernels.name!r} on {kernels.device!r}: "
                "on a CPU q8_0 is the format with 8 bits"
            )
        weights = replace(model.weights, layers=tuple(map(_in_fp8, model.weights.layers)))
    elif quantization in BLOCK_FORMATS:
        weights = _in_blocks(model.weights, BLOCK_FORMATS[quantization])
    else:
        raise ConfigError(
            f"quantization is {', '.join(map(repr, BLOCK_FORMATS))}, {FP8!r} or None, not {quantization!r}: other "
            "formats follow from the file"
        )
    return replace(model, weights=weights, digest_source=partial(_marked, model.later_digest(), quantization))


def _marked(digest: Callable[[], bytes], quantization: str) -> bytes:
    """Another digest than that of the dense model: blocks of one are no blocks of the other."""
    return digest() + quantization.encode()


def _in_blocks(weights: ModelWeights, format: QuantFormat) -> ModelWeights:
    done: dict[tuple[int, QuantFormat], tuple[Any, Any]] = {}  # a matrix that has several places stays one

    def rounded(matrix: Any, own: QuantFormat) -> Any:
        if not _is_dense(matrix) or matrix.shape[-1] % own.block_elements:
            return matrix
        key = id(matrix), own
        if key not in done:
            done[key] = matrix, RoundedTensor(matrix, own, quickly_converted)
        return done[key][1]

    def linear(own: QuantFormat) -> Change:
        return lambda value: replace(value, parts=tuple(rounded(part, own) for part in value.parts))

    found = replace(
        weights,
        embedding=rounded(weights.embedding, OF_VOCABULARY),
        layers=tuple(_with_linears(layer, linear(format)) for layer in weights.layers),
        head=linear(OF_VOCABULARY)(weights.head),
    )
    if not done:
        raise ConfigError(
            f"quantization={format.name.lower()!r} rounds dense matrices with rows of a multiple of 32 values, and "
            "this model has none: leave quantization out"
        )
    return found


def _with_linears(value: Any, change: Change) -> Any:
    """A part of the weights with every linear layer changed but those that choose experts and positions."""
    if isinstance(value, Linear):
        return change(value)
    if isinstance(value, tuple):
        return tuple(_with_linears(part, change) for part in value) if type(value) is tuple else value
    if not is_dataclass(value) or isinstance(value, (type, Norm, QuantizedTensor)):
        return value
    kept = next((name for kind, name in DENSE_PARTS if isinstance(value, kind)), "")
    old = {field.name: getattr(value, field.name) for field in fields(value) if field.init and field.name != kept}
    new = {name: _with_linears(part, change) for name, part in old.items()}
    changed = {name: part for name, part in new.items() if part is not old[name]}
    return replace(value, **changed) if changed else value


def _is_dense(matrix: Any) -> bool:
    return isinstance(matrix, QuantizedTensor) and len(matrix.shape) == 2 and matrix.format in DENSE_FORMATS


def _in_fp8(layer: LayerWeights) -> LayerWeights:
    recurrent = layer.recurrent
    if recurrent is not None:
        recurrent = replace(recurrent, input=_fp8(recurrent.input), output=_fp8(recurrent.output))
    return replace(
        layer,
        qkv=_fp8(layer.qkv),
        output=_fp8(layer.output),
        up=_fp8(layer.up),
        down=_fp8(layer.down),
        recurrent=recurrent,
    )


def _fp8(linear: Linear) -> Linear:
    parts = [part for part in linear.parts if isinstance(part, QuantizedTensor) and part.format in DENSE_FORMATS]
    if not parts or len(parts) != len(linear.parts) or any(type(part) is not QuantizedTensor for part in parts):
        return linear
    return replace(linear, parts=tuple(map(DenseToFp8, parts)))
