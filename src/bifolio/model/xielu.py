"""The activation xIELU: its coefficients as files hold them, and as kernels take them."""

from __future__ import annotations

import math

from bifolio.kernels.interface import XieluCoefficients
from bifolio.model.fetch import FetchVector

LINEAR, MOST = 0.5, -1e-6  # of all networks

Logarithms = tuple[float, float]


def read_xielu(names: tuple[str, str], prefix: str, vector: FetchVector) -> Logarithms:
    """The two coefficients of a layer before their softplus."""
    positive, negative = (float(vector(prefix + name, (1,)).reshape(-1)[0]) for name in names)
    return positive, negative


def xielu_coefficients(logarithms: Logarithms) -> XieluCoefficients:
    positive, negative = (math.log1p(math.exp(value)) for value in logarithms)
    return XieluCoefficients(positive, LINEAR + negative, LINEAR, MOST)
