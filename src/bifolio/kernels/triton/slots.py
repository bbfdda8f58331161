"""`TritonSlots`: the slots of the batch on a GPU, with decode graphs and draws on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from bifolio.errors import PhaseError, UnsupportedModelError
from bifolio.kernels import shared_prefix
from bifolio.kernels.cuda.row_attention import FEW_SEQUENCES, NEAR_TOKENS
from bifolio.kernels.interface import Adapter, AdapterUse, Array, Batch, DraftNetwork, Network, SlotSizes, Storage
from bifolio.kernels.logit_edits import MASK_ALONE, LogitEdits
from bifolio.kernels.shared_prefix import SharedWork, share_work
from bifolio.kernels.torch_arrays import upload
from bifolio.kernels.triton.adapter_slots import AdapterSlots
from bifolio.kernels.triton.cuda_graphs import DecodeGraphs, DeviceTokens, GraphKernels, GraphRecorder, full_shape
from bifolio.kernels.triton.device_state import DeviceState
from bifolio.kernels.triton.draft_draws import MOST, DraftDraws
from bifolio.kernels.triton.draft_steps import DraftSteps
from bifolio.kernels.triton.draw_graphs import DrawGraphs
from bifolio.kernels.triton.edits import SlotEdits
from bifolio.kernels.triton.logprobs import MAX_TOP
from bifolio.kernels.triton.prompt_graphs import INTERPRETED, ON_GPU, SMALL, PromptGraphs
from bifolio.kernels.triton.sampling import Mode, Results, choose_tokens
from bifolio.kernels.triton.shared_attention import MAX_ITEMS, rows_per_item
from bifolio.kernels.triton.tiles import LARGE_HEAD, TILE
from bifolio.kernels.triton.verify_steps import VerifySteps
from bifolio.sampling_params import SamplingParams


class TritonSlots:
    """Implements `DeviceSlots`."""

    def __init__(self, kernels: GraphKernels, network: Network, storage: Storage, sizes: SlotSizes) -> None:
        if len({(s.reach, s.num_kv_heads, s.head_dim) for s in network.shapes}) > len(
            {s.reach for s in network.shapes}
        ):
            raise UnsupportedModelError(
                "on a GPU all layers with the same window must have the same heads: use the CPU"
            )
        self._kernels, self._sizes, self._vocab_size = kernels, sizes, sizes.vocab_size
        self._storage, self._block_size = storage, storage.block_size
        self.state = DeviceState(sizes.num_slots, sizes.max_blocks, kernels.device)
        self.adapters = AdapterSlots(
            network.products, kernels.device, kernels.dtype, most_in_batch=sizes.num_slots, most_idle=sizes.max_loras,
            fixed=kernels.deterministic,
        )  # fmt: skip
        self._adapter_of: list[Adapter | None] = [None] * sizes.num_slots
        self._numbers: tuple[bytes, int, np.ndarray | None] = (b"", 0, None)  # of the slots of the last launch
        self.graphs = DecodeGraphs(kernels, network, storage, self.state, self.adapters)
        self.draws_from_logits = DrawGraphs(self.state, GraphRecorder(self.state.device))
        self._draft_draws = DraftDraws(self.state)
        self.verifications = VerifySteps(kernels, network, storage, self.state, self.graphs.recorder)
        self.prompts: PromptGraphs | None = None
        chooses = any(shape.top_k for shape in network.shapes)
        # How many queries of a prompt choose depends on its length; long prompts wait for experts of the host.
        if network.split is not None and not chooses and not kernels.has_host_experts:
            steps = ON_GPU if self.state.on_gpu else INTERPRETED
            if network.split.tap_width and self.state.on_gpu:
                steps = steps._replace(tokens=(*SMALL, *steps.tokens))
            self.prompts = PromptGraphs(
                kernels, network.split, network.shapes, network.decode_segment, storage, self.state,
                self.graphs.recorder, steps, self.adapters,
            )  # fmt: skip
        self._shapes = network.shapes
        full = [shape for shape in network.shapes if shape.window is None]
        has_slopes = any(shape.slopes is not None for shape in full)
        may_share = bool(full) and not (has_slopes or chooses or kernels.deterministic)
        self._may_share = may_share and full[0].head_dim <= LARGE_HEAD
        self._most_saved = (sizes.num_slots - 1) * sizes.max_model_len  # token reads, by shared prefixes
        self._warm = np.zeros(sizes.num_slots, dtype=np.bool_)  # slots with a temperature
        self._filtered = np.zeros(sizes.num_slots, dtype=np.bool_)  # slots with top-k, top-p or min-p
        self._rare = np.zeros(sizes.num_slots, dtype=np.bool_)  # slots with typical sampling or XTC
        self._scored = np.zeros(sizes.num_slots, dtype=np.bool_)  # slots with logprobs
        self._edited = np.zeros(sizes.num_slots, dtype=np.bool_)  # slots with edits
        self._may_edit = sizes.num_slots * sizes.vocab_size < 1 << 31  # places in the arrays of edits have 32 bits
        self._work: tuple[bytes, SharedWork | None] = (b"", None)  # shared work of the slots of the last launch
        self._decoded: np.ndarray | None = None  # slots whose pass waits for its draw: the device has their lengths

    # -- slots ---------------------------------------------------------------------------------------------------------
    def draws(self, params: SamplingParams, edits: LogitEdits) -> bool:
        """All but XTC without a threshold and more than MAX_TOP likely tokens; those are drawn on the host."""
        if (params.logprobs or 0) > MAX_TOP:
            return False
        if not params.is_greedy and params.xtc_probability > 0.0 and params.xtc_threshold <= 0.0:
            return False
        return edits.is_empty or self._has_room_for_edits()

    def set_params(
        self,
        slot: int,
        params: SamplingParams,
        seed: int,
        edits: LogitEdits | None,
        rope: int = 0,
        adapter: Adapter | None = None,
    ) -> None:
        self._adapter_of[slot], self._numbers = adapter, (b"", 0, None)
        temperature = 0.0 if params.is_greedy else max(params.temperature, float(np.finfo(np.float32).tiny))
        self._warm[slot] = temperature > 0
        self._filtered[slot] = temperature > 0 and params.filters_tokens(self._vocab_size)
        self._rare[slot] = temperature > 0 and (params.typical_p < 1.0 or params.xtc_probability > 0.0)
        self._scored[slot] = params.needs_logprobs
        self._edited[slot] = edits is not None and not edits.is_empty
        self._work = b"", None
        self.state.set_rope(slot, rope)
        self.state.set_logprobs(slot, (params.logprobs or 0) if params.needs_logprobs else None)
        top_k = params.top_k if 0 < params.top_k < self._vocab_size else 0
        self.state.set_sampling(slot, temperature, seed, top_k, params.top_p, params.min_p)
        self.state.set_rare_options(slot, params.typical_p, params.xtc_threshold, params.xtc_probability)
        if self.graphs.edits is not None and edits is not None and not edits.is_empty:
            self.graphs.edits.set(slot, edits)
        else:
            self.state.set_edits(slot, 0, None)

    def prepare_adapter(self, adapter: Adapter) -> Adapter:
        return self.adapters.prepare(adapter)

    def stage_adapters(self, use: AdapterUse) -> AdapterUse:
        return self.adapters.stage(use)

    def _numbers_of(self, slots: np.ndarray) -> np.ndarray | None:
        """i32[n]: the adapters of these slots; None: they have none."""
        key = slots.tobytes()
        if self._numbers[:2] != (key, self.adapters.version):
            own = [self._adapter_of[slot] for slot in slots.tolist()]
            numbers = self.adapters.numbers_of(own) if any(own) else None
            self._numbers = key, self.adapters.version, numbers
        return self._numbers[2]

    def set_history(self, slot: int, prompt: np.ndarray, output: Sequence[int]) -> None:
        if self.graphs.edits is not None:
            self.graphs.edits.set_history(slot, prompt, output)

    def set_mask(self, slot: int, is_used: bool) -> None:
        self._edited[slot] = is_used
        if is_used and self.graphs.edits is not None:
            self.graphs.edits.set(slot, MASK_ALONE)
        else:
            self.state.set_edits(slot, 0, None)

    def mask_rows(self, slots: np.ndarray) -> np.ndarray:
        if self.graphs.edits is None:
            raise PhaseError("masks are sent for slots whose edits have one: call `draws` and `set_params` first")
        return self.graphs.edits.mask_rows(slots)

    def _has_room_for_edits(self) -> bool:
        """Allocate the arrays of edits with the first slot that needs them."""
        if self.graphs.edits is None and self._may_edit:
            try:
                self.graphs.edits = SlotEdits(self.state, self._vocab_size)
            except torch.cuda.OutOfMemoryError:
                self._may_edit = False
        return self.graphs.edits is not None

    def set_blocks(self, slot: int, first: int, block_ids: Any) -> None:
        self.state.set_blocks(slot, first, block_ids)

    def set_progress(self, slots: np.ndarray, lengths: np.ndarray, tokens: np.ndarray) -> None:
        self.state.set_lengths(slots, lengths)
        self.state.set_tokens(slots, tokens)

    def set_states(self, slots: np.ndarray, reads: np.ndarray, writes: np.ndarray) -> None:
        self.state.set_states(slots, reads, writes)

    # -- steps that are not captured -----------------------------------------------------------------------------------
    def fill_tokens(self, token_ids: Array, slots: np.ndarray) -> Array:
        self._decoded = None
        index = upload(slots.astype(np.int64), token_ids.device)
        filled = token_ids.clone()
        known = token_ids[: len(slots)]
        filled[: len(slots)] = torch.where(known < 0, self.state.tokens[index], known).clamp_min(0)
        return filled

    def draw(self, logits: Array, rows: np.ndarray, slots: np.ndarray, positions: np.ndarray) -> DeviceTokens:
        decoded, self._decoded = self._decoded, None
        if decoded is None or not np.array_equal(decoded, slots):
            self.state.set_lengths(slots, positions - 1)
        return self.draws_from_logits.draw(logits, rows, slots, self._mode(slots), self.graphs.edits)

    def draw_drafts(
        self, logits: Array, rows: np.ndarray, slots: np.ndarray, positions: np.ndarray
    ) -> DeviceTokens | None:
        if len(slots) > MOST:
            return None
        return self._draft_draws.draw(logits, rows, slots, positions, self._mode(slots))

    # -- captured steps ------------------------------------------------------------------------------------------------
    def can_verify(self, slots: np.ndarray, length: int) -> bool:
        if any(self._adapter_of[slot] is not None for slot in slots.tolist()):
            return False
        return not self._storage.layout.num_states and self.verifications.fits(len(slots), length + 1)

    def verify(self, slots: np.ndarray, drafts: np.ndarray) -> DeviceTokens:
        self._decoded = None
        return self.verifications.launch(slots, drafts, self._mode(slots))

    def verified_states(self, row: int) -> Array:
        return self.verifications.states(row)

    def decode(self, slots: np.ndarray, tables: np.ndarray, lengths: np.ndarray) -> DeviceTokens:
        self._decoded = None
        work = self._shared_work(slots, tables, lengths)
        order = None
        if work is not None:  # sharers lie side by side; tokens come back in the order of the call
            slots, order = slots[work.order], np.argsort(work.order)
        numbers, is_near = self._numbers_of(slots), self._is_near(lengths)
        step = self.graphs.launch(slots, self._mode(slots), work, is_near=is_near, numbers=numbers)
        return self.graphs.tokens(step, len(slots), order)

    def _is_near(self, lengths: np.ndarray) -> bool:
        """Whether all contexts are short; the kernel reads longer ones too, only slower."""
        return len(lengths) <= FEW_SEQUENCES and int(lengths.max()) < NEAR_TOKENS

    def _mode(self, slots: np.ndarray) -> Mode:
        """The mode of a step of these slots; sends pending changes of their edits."""
        options = self._warm, self._filtered, self._edited, self._scored, self._rare
        mode = Mode.of(*(bool(option[slots].any()) for option in options))
        if mode.edits and self.graphs.edits is not None:
            self.graphs.edits.send()
        return mode

    def decode_logits(
        self, slots: np.ndarray, tables: np.ndarray | None = None, lengths: np.ndarray | None = None
    ) -> Array:
        work = None if tables is None or lengths is None else self._shared_work(slots, tables, lengths)
        self._decoded = slots
        if work is None:
            is_near, numbers = lengths is not None and self._is_near(lengths), self._numbers_of(slots)
            return self.graphs.launch(slots, None, is_near=is_near, numbers=numbers).logits[: len(slots)]
        ordered = slots[work.order]
        logits = self.graphs.launch(ordered, None, work, numbers=self._numbers_of(ordered)).logits
        return logits[upload(np.argsort(work.order), logits.device)]

    def prompt_logits(self, batch: Batch, slots: np.ndarray) -> Array | None:
        self._decoded = None
        return None if self.prompts is None else self.prompts.logits(batch, slots)

    def prompt_states(self, count: int) -> Array:
        if self.prompts is None:
            raise PhaseError("this network runs as a whole: it gives out no states")
        return self.prompts.states(count)

    def draft_slots(self, network: DraftNetwork, storage: Storage) -> DraftSteps:
        self._kernels.tabulate(network.rotations, self._sizes.max_model_len)
        return DraftSteps(self._kernels, network, storage, self.state, self._vocab_size, self._mode, self.verifications)

    def warm_up(self) -> None:
        """Capture steps with prompts, decodes without sampling, and decodes that are greedy or drawn with filters.

        Decodes both with and without shared prefixes. The kernels of other draws are compiled; their steps are captured
        when a batch needs them, since the arrays of edits take memory that few engines use.
        """
        if self.prompts is not None:
            self.prompts.capture_all()
        sizes = self._sizes
        self._kernels.attention.warm_up(self._shapes, self._storage, sizes.max_model_len, sizes.max_chunk)
        compile_draws(self.state.device, self._vocab_size)
        self.graphs.capture_all(None)
        for mode in (Mode(), Mode("filter")):
            self.graphs.capture_all(mode)
            self.draws_from_logits.capture_all(mode, self._vocab_size)
            if self._may_share and self._most_saved >= shared_prefix.MIN_SAVED:
                self.graphs.capture_all(mode, shares=True)

    def warm_up_adapters(self) -> None:
        layout = self.adapters.layout
        if not layout.sites:
            return
        if self.prompts is not None:
            self.prompts.capture_all(layout)
        for mode in (Mode(), Mode("filter")):
            self.graphs.capture_all(mode, layout=layout)

    def _shared_work(self, slots: np.ndarray, tables: np.ndarray, lengths: np.ndarray) -> SharedWork | None:
        """Shared work of these slots; searched again only when other slots take part."""
        if len(slots) < 2 or not self._may_share:
            return None
        key = slots.tobytes()
        if self._work[0] != key:
            own = tables[slots, : int(lengths.max()) // self._block_size + 1]
            per_item = rows_per_item(full_shape(self._shapes))
            self._work = key, share_work(own, lengths, self._block_size, TILE, per_item, MAX_ITEMS)
        return self._work[1]


def compile_draws(device: str, vocab_size: int) -> None:
    """Run the kernels of every mode once, on a few slots of their own."""
    state = DeviceState(4, 1, device)
    edits = SlotEdits(state, vocab_size)
    ids, none = np.arange(2), np.zeros(0, np.int64)
    edits.set(0, LogitEdits(ids, np.zeros(2, np.float32), False, 1.1, 0.1, 0.1, none, 0, has_mask=True))
    edits.set_history(0, ids, [0])
    edits.mask_rows(ids[:1])[:] = -1
    edits.send()
    state.send()
    count = 2
    logits = torch.zeros((count, vocab_size), dtype=torch.float32, device=device)
    rows = torch.full((count,), -1, dtype=torch.int32, device=device)
    turn = torch.zeros(1, dtype=torch.int32, device=device)
    for mode in (Mode("draw"), Mode("filter", True, False), Mode("filter", True, True), Mode("filter", rare=True)):
        results = Results.new(1, count, mode, pinned=state.on_gpu)
        choose_tokens(logits, rows, state, turn, results, mode, edits if mode.edits else None)
    if state.on_gpu:
        torch.cuda.synchronize(device)  # before the state is freed
