"""`LogitEdits`: the changes to a slot's logits that a device carries out, in the order of `sampling.edits`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MAX_ENDS = 8  # token ids that end a sequence; a slot with more is drawn on the host


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """Options of one slot; a grammar's mask comes with each step."""

    bias_ids: np.ndarray  # i64[b]
    bias_amounts: np.ndarray  # f32[b]  added to the logits; -inf: never drawn
    excludes_others: bool  # tokens that `bias_ids` does not name are never drawn
    repetition_penalty: float  # 1: off
    presence_penalty: float
    frequency_penalty: float
    end_ids: np.ndarray  # i64[e]  not drawn at positions below `min_length`; at most MAX_ENDS
    min_length: int  # 0: off
    has_mask: bool

    @property
    def has_bias(self) -> bool:
        return len(self.bias_ids) > 0 or self.excludes_others

    @property
    def counts_tokens(self) -> bool:
        """Whether the device needs the tokens of prompt and output."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def is_empty(self) -> bool:
        return not (self.has_mask or self._has_others)

    @property
    def is_mask_alone(self) -> bool:
        return self.has_mask and not self._has_others

    @property
    def _has_others(self) -> bool:
        return self.has_bias or self.counts_tokens or self.min_length > 0


_NONE, _NO_AMOUNTS = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.float32)
MASK_ALONE = LogitEdits(_NONE, _NO_AMOUNTS, False, 1.0, 0.0, 0.0, _NONE, 0, has_mask=True)
