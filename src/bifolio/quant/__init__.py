"""Numeric formats of weights and the tensors stored in them."""

from bifolio.quant.formats import QuantFormat
from bifolio.quant.tensor import QuantizedTensor

__all__ = ["QuantFormat", "QuantizedTensor"]
