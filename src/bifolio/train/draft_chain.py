"""The layer of a draft head in torch, for training: all drafts of a sequence at once, several tokens deep.

A chain starts behind every position j. Its first entry reads the target's states of position j; entry k reads the
hidden state of entry k - 1, as a draft does. Attention of entry k sees the first entries of the positions up to j, and
the entries 1 to k of its own chain:

    keys     first entries 0 .. j (all chains share them)      own entries 1 .. k
    query    entry k of chain j, at position j + k
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from bifolio.config import ModelConfig
from bifolio.model.weights import inverse_frequencies

INIT_STD = 0.02


class DraftChain(nn.Module, ABC):
    """The trained weights under their published names, and chains of drafts over whole sequences."""

    def __init__(
        self, config: ModelConfig, layer: str, width: int, sizes: Mapping[str, tuple[int, int]], norms: Sequence[str]
    ) -> None:
        """`layer`: prefix of the names of the layer, whose attention reads rows of `width`.

        `sizes` and `norms` are those of the other matrices and norms.
        """
        super().__init__()
        self.config, self.layer = config, layer
        d, ffn = config.hidden_size, config.intermediate_size
        own = {
            "self_attn.q_proj": (config.query_size, width),
            "self_attn.k_proj": (config.kv_size, width),
            "self_attn.v_proj": (config.kv_size, width),
            "self_attn.o_proj": (d, config.query_size),
            "mlp.gate_proj": (ffn, d),
            "mlp.up_proj": (ffn, d),
            "mlp.down_proj": (d, ffn),
        }
        every = {**sizes, **{layer + name: size for name, size in own.items()}}
        norms = (*norms, layer + "post_attention_layernorm")
        self.names = [*every, *norms]
        matrices = [nn.Parameter(torch.randn(size) * INIT_STD) for size in every.values()]
        self.values = nn.ParameterList([*matrices, *(nn.Parameter(torch.ones(d)) for _ in norms)])
        frequencies, self.rope_scale = inverse_frequencies(config.ropes[0])
        self.frequencies = torch.from_numpy(frequencies if frequencies.ndim == 1 else frequencies[0])  # texts are short

    @abstractmethod
    def first(self, states: torch.Tensor) -> torch.Tensor:
        """[b, n, d]: the hidden states of the first entries, from those of the target."""

    @abstractmethod
    def inputs(self, hidden: torch.Tensor, embeddings: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual stream [b, n, d] and the input of attention [b, n, width] of entries."""

    @abstractmethod
    def read_out(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of hidden states."""

    def value(self, name: str) -> torch.Tensor:
        value: torch.Tensor = self.values[self.names.index(name)]
        return value

    def forward(self, states: torch.Tensor, embeddings: torch.Tensor, depth: int) -> list[torch.Tensor]:
        """Logits [b, n - k, draft vocab] of the entries k = 0 .. depth - 1 of all chains.

        states [b, n, s] of the positions 0 .. n - 1, embeddings [b, n, d] of the tokens at 1 .. n.
        """
        hidden = self.first(states)
        keys, values, logits = [], [], []
        for k in range(depth):
            residual, inputs = self.inputs(hidden[:, : states.shape[1] - k], embeddings[:, k:])
            query, key, value = (self._heads(inputs, name, k) for name in "qkv")
            keys.append(key)
            values.append(value)
            hidden = residual + self._linear(self._attend(query, keys, values), "self_attn.o_proj")
            normed = self.norm(hidden, self.layer + "post_attention_layernorm")
            gate, up = (self._linear(normed, f"mlp.{name}_proj") for name in ("gate", "up"))
            hidden = hidden + self._linear(F.silu(gate) * up, "mlp.down_proj")
            logits.append(self.read_out(hidden))
        return logits

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.value(name), self.config.norm_eps)

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, self.value(self.layer + name))

    def _heads(self, inputs: torch.Tensor, name: str, shift: int) -> torch.Tensor:
        """[b, heads, n, head_dim], queries and keys rotated by their positions, which begin at `shift`."""
        size = self.config.head_dim
        x = self._linear(inputs, f"self_attn.{name}_proj")
        x = x.reshape(*x.shape[:2], -1, size).transpose(1, 2)
        if name != "v":
            angles = torch.arange(shift, shift + x.shape[2])[:, None] * self.frequencies[None]
            cos, sin = (torch.cat([f(angles)] * 2, dim=-1) * self.rope_scale for f in (torch.cos, torch.sin))
            x = x * cos + torch.cat([-x[..., size // 2 :], x[..., : size // 2]], dim=-1) * sin
        return x if name == "q" else x.repeat_interleave(self.config.num_heads // self.config.num_kv_heads, dim=1)

    def _attend(self, query: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]) -> torch.Tensor:
        count, scale = query.shape[2], 1 / math.sqrt(self.config.head_dim)
        first = query @ keys[0][:, :, :count].transpose(2, 3) * scale
        first = first.masked_fill(torch.ones(count, count, dtype=torch.bool).triu(1), -math.inf)
        own = [(query * key[:, :, :count]).sum(-1, keepdim=True) * scale for key in keys[1:]]
        shares = torch.cat([first, *own], dim=-1).softmax(dim=-1)
        mixed = shares[..., :count] @ values[0][:, :, :count]
        for number, value in enumerate(values[1:]):
            mixed = mixed + shares[..., count + number, None] * value[:, :, :count]
        return mixed.transpose(1, 2).flatten(2)
