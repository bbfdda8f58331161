"""An EAGLE-3 head in torch, for training: all drafts of a sequence at once, several tokens deep.

A chain starts behind every position j. Its first entry reads the target's states of position j; entry k reads the
hidden state of entry k - 1, as a draft does. Attention of entry k sees the first entries of the positions up to j, and
the entries 1 to k of its own chain:

    keys     first entries 0 .. j (all chains share them)      own entries 1 .. k
    query    entry k of chain j, at position j + k

Hidden states of some models are thousands of times larger than weights. Training divides them by their mean size; the
written weights take the states as they are.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from bifolio.config import ModelConfig, RopeConfig
from bifolio.model.draft_head import default_taps
from bifolio.model.loaded import LoadedModel
from bifolio.model.weights import LayerWeights, inverse_frequencies
from bifolio.quant.tensor import QuantizedTensor

LEAST_LAYERS = 6  # of a target whose states are read after the usual layers
INIT_STD = 0.02


def taps_of(num_layers: int) -> tuple[int, ...]:
    """The layers that a new head reads: the usual ones, or spread over a shallow target."""
    return default_taps(num_layers) if num_layers >= LEAST_LAYERS else (1, (num_layers + 1) // 2, num_layers)


def head_config(target: ModelConfig) -> ModelConfig:
    """One layer of Llama with the sizes of the target's layers."""
    intermediate = target.intermediate_size if target.moe is None else target.moe.expert_size * target.moe.top_k
    head_dim = target.head_dim if target.mla is None else target.hidden_size // target.num_heads
    rope = target.ropes[0] if target.ropes and target.ropes[0].rotary_dim == head_dim else None
    return ModelConfig(
        architecture="llama",
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        num_layers=1,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads if target.mla is None else target.num_heads,
        head_dim=head_dim,
        intermediate_size=intermediate,
        max_position=target.max_position,
        norm_eps=target.norm_eps,
        ropes=(rope or _plain_rope(target, head_dim),),
        bos_token_id=target.bos_token_id,
        eos_token_ids=target.eos_token_ids,
    )


def _plain_rope(target: ModelConfig, head_dim: int) -> RopeConfig:
    return RopeConfig(target.ropes[0].theta if target.ropes else 10000.0, head_dim)


class EagleHead(nn.Module):
    """The trained weights under their published names, and chains of drafts over whole sequences."""

    def __init__(self, config: ModelConfig, token_ids: np.ndarray, sizes_of_states: np.ndarray | None = None) -> None:
        """`sizes_of_states`: f32[3], the mean size of the states after each layer that is read."""
        super().__init__()
        self.state_sizes = np.ones(3, np.float32) if sizes_of_states is None else sizes_of_states
        d, ffn, self.config = config.hidden_size, config.intermediate_size, config
        sizes = {
            "fc": (d, 3 * d),
            "lm_head": (len(token_ids), d),
            "midlayer.self_attn.q_proj": (config.query_size, 2 * d),
            "midlayer.self_attn.k_proj": (config.kv_size, 2 * d),
            "midlayer.self_attn.v_proj": (config.kv_size, 2 * d),
            "midlayer.self_attn.o_proj": (d, config.query_size),
            "midlayer.mlp.gate_proj": (ffn, d),
            "midlayer.mlp.up_proj": (ffn, d),
            "midlayer.mlp.down_proj": (d, ffn),
        }
        norms = ("norm", "midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm")
        self.names = [*sizes, *norms]
        matrices = [nn.Parameter(torch.randn(size) * INIT_STD) for size in sizes.values()]
        self.values = nn.ParameterList([*matrices, *(nn.Parameter(torch.ones(d)) for _ in norms)])
        frequencies, self.rope_scale = inverse_frequencies(config.ropes[0], config.max_position)
        self.frequencies = torch.from_numpy(frequencies)

    def value(self, name: str) -> torch.Tensor:
        value: torch.Tensor = self.values[self.names.index(name)]
        return value

    def tensors(self) -> dict[str, np.ndarray]:
        """The weights as they are written, in 16 bits: for states as they are, with a residual stream of their size."""
        size = float(self.state_sizes[2])
        factors = {
            "fc": size / np.repeat(self.state_sizes, self.config.hidden_size),
            "midlayer.self_attn.o_proj": size,
            "midlayer.mlp.down_proj": size,
        }
        return {
            f"{name}.weight": (value.detach().numpy() * factors.get(name, 1.0)).astype(np.float16)
            for name, value in zip(self.names, self.values, strict=True)
        }

    @torch.no_grad()
    def start_from(self, target: LoadedModel, token_ids: np.ndarray) -> None:
        """Begin as the end of the target: its last MLP and norm, its head, and its highest state as it is."""
        weights, d = target.weights, self.config.hidden_size
        self.value("lm_head").copy_(torch.from_numpy(_rows(weights.head.parts[0], token_ids)))
        self.value("norm").copy_(torch.from_numpy(np.array(weights.final_norm.weight)))
        self.value("fc").zero_()[:, 2 * d :] = torch.eye(d)
        self.value("midlayer.self_attn.o_proj").zero_()
        self._copy_mlp(weights.layers[-1])

    def _copy_mlp(self, layer: LayerWeights) -> None:
        names = ("gate", "up", "down")
        parts = [*layer.up.parts, *layer.down.parts]
        for name, part in zip(names, parts, strict=False):
            value = self.value(f"midlayer.mlp.{name}_proj")
            if len(parts) == len(names) and tuple(part.shape) == tuple(value.shape):
                value.copy_(torch.from_numpy(_rows(part)) / (float(self.state_sizes[2]) if name == "down" else 1.0))
        if layer.mlp_norm is not None:
            self.value("midlayer.post_attention_layernorm").copy_(torch.from_numpy(np.array(layer.mlp_norm.weight)))

    def forward(self, states: torch.Tensor, embeddings: torch.Tensor, depth: int) -> list[torch.Tensor]:
        """Logits [b, n - k, draft vocab] of the entries k = 0 .. depth - 1 of all chains.

        states [b, n, 3 d] of the positions 0 .. n - 1, embeddings [b, n, d] of the tokens at 1 .. n.
        """
        states = states / torch.from_numpy(np.repeat(self.state_sizes, self.config.hidden_size))
        hidden = F.linear(states, self.value("fc"))
        keys, values, logits = [], [], []
        for k in range(depth):
            count = states.shape[1] - k
            hidden = hidden[:, :count]
            normed = self._norm(hidden, "midlayer.hidden_norm")
            inputs = torch.cat([self._norm(embeddings[:, k:], "midlayer.input_layernorm"), normed], dim=-1)
            query, key, value = (self._heads(inputs, name, k) for name in "qkv")
            keys.append(key)
            values.append(value)
            hidden = hidden + F.linear(self._attend(query, keys, values), self.value("midlayer.self_attn.o_proj"))
            normed = self._norm(hidden, "midlayer.post_attention_layernorm")
            gate, up = (F.linear(normed, self.value(f"midlayer.mlp.{name}_proj")) for name in ("gate", "up"))
            hidden = hidden + F.linear(F.silu(gate) * up, self.value("midlayer.mlp.down_proj"))
            logits.append(F.linear(self._norm(hidden, "norm"), self.value("lm_head")))
        return logits

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.value(name), self.config.norm_eps)

    def _heads(self, inputs: torch.Tensor, name: str, shift: int) -> torch.Tensor:
        """[b, heads, n, head_dim], queries and keys rotated by their positions, which begin at `shift`."""
        size = self.config.head_dim
        x = F.linear(inputs, self.value(f"midlayer.self_attn.{name}_proj"))
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


def _rows(tensor: QuantizedTensor | np.ndarray, rows: np.ndarray | None = None) -> np.ndarray:
    """Rows of a matrix as f32; by default all."""
    if isinstance(tensor, QuantizedTensor):
        return np.array(tensor.dequantize() if rows is None else tensor.dequantize_rows(rows), np.float32)
    return np.array(tensor if rows is None else tensor[rows], np.float32)


def rows_of(tensor: QuantizedTensor | np.ndarray, rows: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(_rows(tensor, rows))
