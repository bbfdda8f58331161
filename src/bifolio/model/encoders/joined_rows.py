"""Tensors of GGUF encoders that some files join: query, key and value; gate and up of the MLP."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bifolio.config import ModelConfig
from bifolio.model.model_file import TensorSource
from bifolio.quant.tensor import QuantizedTensor

JOINED = {"attn_q": ("attn_qkv", 0, 3), "attn_k": ("attn_qkv", 1, 3), "attn_v": ("attn_qkv", 2, 3)}


@dataclass(frozen=True, slots=True)
class JoinedRows:
    """The tensors of a file, whether query, key and value are joined or not."""

    source: TensorSource
    config: ModelConfig

    def has(self, name: str) -> bool:
        joined = self._joined(name)
        return self.source.has(name) or (joined is not None and self.source.has(joined[0]))

    def view(self, name: str, shape: tuple[int, ...]) -> QuantizedTensor:
        joined = self._joined(name)
        if self.source.has(name) or joined is None or not self.source.has(joined[0]):
            return self.source.view(name, shape)
        whole, place, count = joined
        rows = np.arange(place * shape[0], (place + 1) * shape[0])
        return self.source.view(whole, (count * shape[0], *shape[1:])).select_rows(rows)

    def _joined(self, name: str) -> tuple[str, int, int] | None:
        """The name of the joined tensor, the place of this one in it, and their number."""
        for part, (whole, place, count) in JOINED.items():
            if f".{part}." in name:
                return name.replace(f".{part}.", f".{whole}."), place, count
        return None
