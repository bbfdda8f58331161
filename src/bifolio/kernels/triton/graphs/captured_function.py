"""A function of one tensor as a CUDA graph, such as a tower of images."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bifolio.kernels.interface import Array
from bifolio.kernels.triton.graphs.graph_cache import CapturedPass, GraphCache
from bifolio.kernels.triton.lazy_fusion import tensor


class CapturedFunction(CapturedPass):
    """The graph, with room for the tensor and for the result."""

    def __init__(self, cache: GraphCache, function: Callable[[Array], Array], x: torch.Tensor) -> None:
        self._function, self._x = function, x.clone()
        self._result: torch.Tensor | None = None
        if cache.on_gpu:
            self.graph = cache.record(self.run, "functions")

    def run(self) -> None:
        self._result = tensor(self._function(self._x))

    def __call__(self, x: Array) -> Array:
        self._x.copy_(tensor(x))
        self.launch()
        assert self._result is not None
        return self._result.clone()
