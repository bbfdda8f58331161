"""The loop of `LanguageModel.generate`: passes over a paged cache, and the choice of each token."""

from __future__ import annotations

import math

import torch

from bifolio.cache.block_manager import KVCacheBlockManager
from bifolio.cache.storage import KvCacheEntry
from bifolio.engine.executor import DecodeExecutor, ModelRunner, PrefillExecutor
from bifolio.errors import NO_FINITE_LOGIT, ConfigError, ModelOutputError
from bifolio.long_rope import rope_of_length


class DecodeLoop:
    """Decoding of equally long sequences on the two executors, with its own paged cache."""

    def __init__(self, runner: ModelRunner, num_sequences: int) -> None:
        storage = runner.storage
        blocks = KVCacheBlockManager(
            storage.num_blocks,
            storage.block_size,
            enable_prefix_caching=False,
            num_states=storage.layout.num_states,
        )
        self._prefill, self._decode = PrefillExecutor(runner), DecodeExecutor(runner)
        self._config = runner.weights.config
        self._entries = [KvCacheEntry.open(storage, blocks) for _ in range(num_sequences)]

    def logits(self, window: torch.Tensor) -> torch.Tensor:
        """f32[B, vocab] after `window` [B, T]: a decode step if the window grew by one token, else a prefill.

        A window of unchanged length has shifted by one token: all positions differ, so it is recomputed. So is one that
        has grown too long for the short frequencies of LongRoPE.
        """
        tokens, known = window.cpu().numpy(), self._entries[0].seq_len
        is_rotated = self._entries[0].rope == rope_of_length(self._config, window.shape[1])
        if window.shape[1] == known + 1 and known and is_rotated:
            logits = self._decode.append(self._entries, list(tokens[:, -1:]))
        else:
            for entry in self._entries:
                entry.truncate(0)
            logits = self._prefill.append(self._entries, list(tokens))
        return torch.as_tensor(logits)


class TokenChooser:
    """Samples one token per row of logits; equal seeds give equal samples."""

    def __init__(
        self, temperature: float, top_k: int | None, top_p: float | None, seed: int | None, device: torch.device
    ) -> None:
        if not (math.isfinite(temperature) and temperature >= 0):
            raise ConfigError(f"the temperature must be 0 (greedy) or more, not {temperature}")
        if top_k is not None and top_k < 1:
            raise ConfigError(f"top_k must be at least 1, not {top_k}")
        if top_p is not None and not 0 < top_p <= 1:
            raise ConfigError(f"top_p must be above 0 and at most 1, not {top_p}")
        self.temperature, self.top_k, self.top_p = temperature, top_k, top_p
        self.generator = None if seed is None else torch.Generator(device).manual_seed(seed)

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """f32[B, vocab] → i64[B]; NaN counts as excluded, and a row of nothing else raises."""
        if not bool(logits.isfinite().all()):
            logits = logits.nan_to_num(nan=-math.inf, posinf=torch.finfo(logits.dtype).max, neginf=-math.inf)
            if not bool(logits.isfinite().any(dim=-1).all()):
                raise ModelOutputError(NO_FINITE_LOGIT)
        if self.temperature == 0.0:
            return logits.argmax(dim=-1)
        scores = logits.float() / self.temperature
        if self.top_k is not None and self.top_k < scores.shape[-1]:
            scores = scores.masked_fill(scores < scores.topk(self.top_k).values[:, -1:], -math.inf)
        if self.top_p is not None and self.top_p < 1.0:
            ordered, order = scores.softmax(dim=-1).sort(dim=-1, descending=True)
            outside = (ordered.cumsum(dim=-1) - ordered) >= self.top_p  # the token that crosses top_p stays
            scores = scores.masked_fill(torch.zeros_like(outside).scatter(-1, order, outside), -math.inf)
        return torch.multinomial(scores.softmax(dim=-1), 1, generator=self.generator)[:, 0]
