"""The paged cache behind `LanguageModel.decode`: one row of blocks for each sequence of a rectangular batch."""

from __future__ import annotations

import torch

from bifolio.cache.block_manager import KVCacheBlockManager
from bifolio.cache.storage import KVStorage
from bifolio.config import KVDtype, ModelConfig
from bifolio.kernels.interface import AttentionPhase, AttentionSegment, Batch
from bifolio.kernels.torch_reference import TorchKernels

BLOCK_SIZE = 16
_NAMES: dict[torch.dtype, KVDtype] = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


class DecodeCache:
    """Blocks for `num_rows` equally long sequences of at most `max_length` tokens."""

    def __init__(self, config: ModelConfig, num_rows: int, max_length: int, kernels: TorchKernels) -> None:
        num_blocks = 1 + num_rows * -(-max_length // BLOCK_SIZE)
        self.blocks = KVCacheBlockManager(num_blocks, BLOCK_SIZE, enable_prefix_caching=False)
        self.storage = KVStorage(
            config.num_layers,
            num_blocks,
            BLOCK_SIZE,
            config.num_kv_heads,
            config.head_dim,
            _NAMES[kernels.dtype],
            device=kernels.device,
            backend="torch",
        )
        self.num_rows = num_rows
        self.num_computed = 0  # tokens of the current window whose keys and values are in the cache
        for row in range(num_rows):
            self.blocks.open_row(row)

    def stage(self, window: torch.Tensor) -> Batch:
        """The pass that computes what is missing of `window` [B, T] and gives the logits of its last tokens.

        A window as long as the one before has moved by a token: every position in it is another one, so all of it is
        computed again.
        """
        length = window.shape[1]
        if length <= self.num_computed:
            self.num_computed = 0
            for row in range(self.num_rows):
                self.blocks.truncate(row, 0)
        start, self.num_computed = self.num_computed, length
        self.blocks.try_append_many((row, length - start) for row in range(self.num_rows))
        return self._batch(window, start)

    def _batch(self, window: torch.Tensor, start: int) -> Batch:
        length, device = window.shape[1], window.device
        num_new = length - start
        tables = torch.tensor([self.blocks.row_block_ids(row) for row in range(self.num_rows)], device=device)
        positions = torch.arange(start, length, device=device)
        slots = tables[:, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE  # [B, num_new]
        num_tokens = self.num_rows * num_new
        segment = AttentionSegment(
            phase=AttentionPhase.PREFILL if start == 0 else AttentionPhase.DECODE,
            token_start=0,
            token_end=num_tokens,
            query_starts=torch.arange(0, num_tokens + 1, num_new, device=device),
            context_lens=torch.full((self.num_rows,), length, device=device),
            block_tables=tables,
            fresh=start == 0,
            max_query_len=num_new,
            max_context_len=length,
        )
        last_rows = torch.arange(num_new - 1, num_tokens, num_new, device=device)
        tokens = window[:, start:].flatten()
        return Batch(tokens, positions.repeat(self.num_rows), slots.flatten(), (segment,), last_rows, length - 1)
