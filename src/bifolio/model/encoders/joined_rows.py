"""Tensors of GGUF encoders that some files join: query, key and value; gate and up of the MLP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from bifolio.config import ModelConfig
from bifolio.model.model_file import TensorSource
from bifolio.quant.tensor import QuantizedTensor

HEADS = {"attn_q": 0, "attn_k": 1, "attn_v": 2}
HALVES = {"ffn_gate": 0, "ffn_up": 1}


class Part(NamedTuple):
    """A tensor that is a part of the rows of another one."""

    whole: str
    place: int
    parts: int  # of the whole


@dataclass(frozen=True, slots=True)
class JoinedRows:
    """The tensors of a file by their own names, whether it joins them or not."""

    source: TensorSource
    config: ModelConfig

    def has(self, name: str) -> bool:
        part = self._part(name)
        return self.source.has(name if part is None else part.whole)

    def view(self, name: str, shape: tuple[int, ...]) -> QuantizedTensor:
        part = self._part(name)
        if part is None:
            return self.source.view(name, shape)
        rows = np.arange(part.place * shape[0], (part.place + 1) * shape[0])
        return self.source.view(part.whole, (part.parts * shape[0], *shape[1:])).select_rows(rows)

    def _part(self, name: str) -> Part | None:
        """The tensor that this one is a part of; None: it is stored by itself."""
        role = next((role for role in (*HEADS, *HALVES) if f".{role}." in name), None)
        if role is None:
            return None
        if role in HEADS:
            whole = name.replace(role, "attn_qkv")
            return Part(whole, HEADS[role], len(HEADS)) if self.source.has(whole) else None
        is_joined = self.config.gated_mlp and not self.source.has(name.replace(role, "ffn_gate"))
        return Part(name.replace(role, "ffn_up"), HALVES[role], len(HALVES)) if is_joined else None
