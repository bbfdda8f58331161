"""Forced tokens: where a grammar leaves no choice, tokens are appended without a step each.

    drawn      {"        then only one text can follow:   name  ":  "
    tokens     |<-- computed -->|{"|name|":|"|
                                |<- the next pass, like a prompt chunk ->|   draws the first token with a choice

The mask of such a position has one token, so any draw returns it: the output is the same, bit for bit. The pass
computes several tokens and draws once. A slot is excluded where a position needs its own logits or another option can
forbid the token: logprobs, beams, logits processors, `allowed_token_ids`, `bad_words`, `min_tokens`. While a step of
the sequence is in flight, its next draw takes a step.
"""

from __future__ import annotations

import numpy as np

from bifolio.sampling.grammar_mask import GrammarMask
from bifolio.sampling.table import SlotOptions
from bifolio.sampling.thinking import ThinkingMask
from bifolio.sequence import Sequence


class ForcedTokens:
    """The slots of one engine whose grammars may append tokens, and how many tokens they have appended."""

    def __init__(self, num_slots: int) -> None:
        self.is_on = np.zeros(num_slots, dtype=np.bool_)
        self.num_tokens = 0
        self._masks: dict[int, GrammarMask | ThinkingMask] = {}

    def set_slot(self, slot: int, sequence: Sequence, options: SlotOptions | None) -> None:
        """A new sequence holds the slot."""
        self.clear_slot(slot)
        if options is None or sequence.group is not None or options.params.needs_logprobs:
            return
        forbids = options.allowed is not None or options.words or options.processors or options.params.min_tokens
        if isinstance(options.mask, GrammarMask | ThinkingMask) and not forbids:
            self.is_on[slot] = True
            self._masks[slot] = options.mask

    def clear_slot(self, slot: int) -> None:
        self.is_on[slot] = False
        self._masks.pop(slot, None)

    def after(self, slot: int, sequence: Sequence) -> list[int]:
        """The tokens that must follow the newest token of the slot's sequence."""
        if sequence.finish_reason is not None or sequence.num_in_flight:
            return []
        return self._masks[slot].forced()

    def appended(self, sequence: Sequence) -> None:
        """Count a token that was appended without a step."""
        self.num_tokens += 1
        sequence.request.metrics.num_forced_tokens += 1
