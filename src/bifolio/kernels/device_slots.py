"""`DeviceSlots`: the slots of the batch on a device that launches steps ahead of the host, and the tokens it draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from bifolio.kernels.batch import AdapterUse, Batch
from bifolio.kernels.logit_edits import LogitEdits
from bifolio.kernels.operands import Adapter, Array


class SlotSizes(NamedTuple):
    """The dimensions of per-slot state."""

    num_slots: int
    max_blocks: int  # of one sequence
    max_model_len: int
    vocab_size: int
    max_chunk: int  # prompt tokens of one sequence in a step
    max_loras: int = 16  # adapters on the device that no step uses


@dataclass(slots=True)
class TokenScores:
    """Numbers from which the host computes the logprobs of drawn tokens; defined for slots that have logprobs.

    Logits are the model's own, less the largest of their row.
    """

    totals: np.ndarray  # i64[n]  sum of the weights of all tokens (`kernels.weights`)
    logits: np.ndarray  # f32[n]  of the drawn token
    ranks: np.ndarray  # i32[n]  1: no token was more likely
    top_ids: np.ndarray  # i32[n, k]  the most likely tokens, best first; -1: fewer have a finite logit
    top_logits: np.ndarray  # f32[n, k]


class PendingTokens(Protocol):
    """Tokens sampled by a launched step."""

    def wait(self) -> np.ndarray:
        """i32[n], in the order of the launch; -1 where no token can be sampled. Waits for the step."""
        ...

    def scores(self) -> TokenScores | None:
        """Scores of the tokens, after `wait`; None if no slot of the step has logprobs."""
        ...


class PendingDrafts(Protocol):
    """Draft tokens of a launched head."""

    def wait(self) -> np.ndarray:
        """i32[n, length]; -1 where no token can be sampled. Waits for the head."""
        ...


class DraftSlots(Protocol):
    """The passes of a draft head on a device, all drafts of a step in one launch."""

    def draft(
        self,
        batch: Batch,
        tables: np.ndarray,
        slots: np.ndarray,
        positions: np.ndarray,
        entries: np.ndarray,
        length: int,
    ) -> PendingDrafts | None:
        """Draft `length` tokens for each of `slots` (i32[n]), which have no edits. None: the step is not captured.

        The tokens stay on the device, too, where `DeviceSlots.verify` finds them.

        batch:      the pass over hidden states of the target, on the host but for `given`; its tokens end with the
                    newest one of each sequence
        tables:     i32[n, blocks]  from the first block of the head's context on
        positions:  i64[n]  of the first draft tokens; the noise of a draw depends on it
        entries:    i64[n]  entries of the head's context, behind which those of the drafts are written
        """
        ...

    def read(self, batch: Batch, tables: np.ndarray, slots: np.ndarray) -> bool:
        """Write the head's entries of tokens (as for `draft`) without drafting; False: the step is not captured."""
        ...

    def follow(self, slots: np.ndarray, tables: np.ndarray, length: int) -> PendingDrafts:
        """Draft `length` tokens after those that the last `DeviceSlots.verify`, of the same slots, accepts.

        The head reads the hidden states of that pass; its context ends before them. `tables` as for `draft`.
        """
        ...

    def warm_up(self, longest: int) -> None:
        """Capture the steps of all lengths up to `longest` now."""
        ...


class DeviceSlots(Protocol):
    """Per-slot state on a device, so that a step needs little data from the host.

    It holds block tables, the number of cached tokens, the newest token and the sampling parameters of each slot; the
    host sends differences. All updates are queued after the passes launched before.
    """

    def draws(self, params: Any, edits: LogitEdits) -> bool:
        """Whether a slot with these `SamplingParams` is drawn on the device."""
        ...

    def set_params(
        self,
        slot: int,
        params: Any,
        seed: int,
        edits: LogitEdits | None,
        rope: int = 0,
        adapter: Adapter | None = None,
    ) -> None:
        """A new sequence holds the slot; without `edits` it is drawn on the host.

        `rope`: added to the positions of its newest tokens: LONG_ROPE where the long set rotates (`bifolio.long_rope`),
        and the shift behind its images (`bifolio.images`). `adapter`: prepared by these slots.
        """
        ...

    def prepare_adapter(self, adapter: Adapter) -> Adapter:
        """Repack the matrices of an adapter when it is loaded; any thread may call this."""
        ...

    def stage_adapters(self, use: AdapterUse) -> AdapterUse:
        """The adapters of a pass that is launched kernel by kernel."""
        ...

    def set_history(self, slot: int, prompt: np.ndarray, output: Sequence[int]) -> None:
        """Prompt and output of a slot whose edits count tokens; the device counts the tokens that it draws itself."""
        ...

    def set_mask(self, slot: int, is_used: bool) -> None:
        """Whether the next draws of a slot use a mask, which is the only edit of its sequence."""
        ...

    def mask_rows(self, slots: np.ndarray) -> np.ndarray:
        """i32[n, ceil(vocab / 32)] on the host: the tokens that may be drawn next for slots whose edits have a mask.

        One bit for each token, lowest first. The caller fills all of them; the next draw sends them in one copy.
        """
        ...

    def set_blocks(self, slot: int, first: int, block_ids: Sequence[int]) -> None:
        """Set the slot's block table from index `first` on."""
        ...

    def set_progress(self, slots: np.ndarray, lengths: np.ndarray, tokens: np.ndarray) -> None:
        """Set the cached tokens and the newest token of slots, after the host sampled or prefilled them."""
        ...

    def set_states(self, slots: np.ndarray, reads: np.ndarray, writes: np.ndarray) -> None:
        """Set the recurrent states that the next decode step of slots reads and writes (-1: none)."""
        ...

    def fill_tokens(self, token_ids: Array, slots: np.ndarray) -> Array:
        """`token_ids` i32[t] with -1 in its first len(slots) entries replaced by the newest token of `slots`."""
        ...

    def draw(self, logits: Array, rows: np.ndarray, slots: np.ndarray, positions: np.ndarray) -> PendingTokens:
        """Sample the token at `positions[i]` of `slots[i]` from `logits[rows[i]]`; it becomes the slot's newest."""
        ...

    def decode(self, slots: np.ndarray, tables: np.ndarray, lengths: np.ndarray) -> PendingTokens:
        """Run one whole decode step of these slots, sampled on the device.

        `tables` (i32[num_slots, max_blocks]) and `lengths` (i64[n], cached tokens of `slots`) are the host's copies.
        """
        ...

    def decode_logits(
        self, slots: np.ndarray, tables: np.ndarray | None = None, lengths: np.ndarray | None = None
    ) -> Array:
        """f32[n, vocab]: a decode step without sampling; valid until the next launch.

        `tables` and `lengths` as for `decode`, to find shared prefixes; None if slots change blocks in place (beams).
        """
        ...

    def prompt_logits(self, batch: Batch, slots: np.ndarray) -> Array | None:
        """f32[r, vocab]: a step with prompts or drafts, without sampling. None: it is not captured.

        The arrays of `batch` are on the host, but for `given`. `slots` (i32[n]) hold its sequences; -1 among the
        tokens of decodes stands for the newest token of the slot. The logits are valid until the next launch.
        """
        ...

    def prompt_states(self, count: int) -> Array:
        """f32[count, width]: the hidden states that the last `prompt_logits` gave out for its first tokens."""
        ...

    def draw_drafts(
        self, logits: Array, rows: np.ndarray, slots: np.ndarray, positions: np.ndarray
    ) -> PendingTokens | None:
        """Like `draw`, for any number of positions of each slot, whose length and newest token stay as they are.

        For slots without edits. None: there is no room for so many draws.
        """
        ...

    def can_verify(self, slots: np.ndarray, length: int) -> bool:
        """Whether `verify` has room for these slots (i32[n]) with `length` drafts each, and their options."""
        ...

    def verify(self, slots: np.ndarray, drafts: np.ndarray) -> PendingTokens:
        """Run a whole step that verifies drafts, for slots without edits whose newest tokens are not computed.

        drafts:  i32[n, length]; -1: those that a head has left on the device, -2: none

        A token is sampled after the newest one and after each draft: these are returned, slot by slot. Each slot keeps
        the drafts before the first one that differs from the token sampled in its place, and the token sampled after
        them: its length and its newest token on the device are then those.
        """
        ...

    def verified_states(self, row: int) -> Array:
        """f32[1, width]: the hidden state of the newest token of a slot of the last `verify`, by its place there."""
        ...

    def draft_slots(self, network: Any, storage: Any) -> DraftSlots | None:
        """The passes of a head (`DraftNetwork`) over its storage; None: they are called one by one."""
        ...

    def warm_up(self) -> None:
        """Capture the graphs of all batch sizes now instead of when a step first needs them."""
        ...

    def warm_up_adapters(self) -> None:
        """Capture the usual steps with the adapters that are prepared, instead of when a step first needs them."""
        ...
