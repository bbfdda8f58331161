"""An EAGLE-3 head in torch, for training (`train.draft_chain`).

Hidden states of some models are thousands of times larger than weights. Training divides them by their mean size; the
written weights take the states as they are.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from bifolio.config import ModelConfig, RopeConfig
from bifolio.model.draft_head import default_taps
from bifolio.model.loaded import LoadedModel
from bifolio.model.weights import LayerWeights
from bifolio.train.draft_chain import DraftChain
from bifolio.train.head_data import rows_of

LEAST_LAYERS = 6  # of a target whose states are read after the usual layers


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


class EagleHead(DraftChain):
    """The trained weights of a head with a vocabulary of its own."""

    def __init__(self, config: ModelConfig, token_ids: np.ndarray, sizes_of_states: np.ndarray | None = None) -> None:
        """`sizes_of_states`: f32[3], the mean size of the states after each layer that is read."""
        d = config.hidden_size
        norms = ("norm", "midlayer.input_layernorm", "midlayer.hidden_norm")
        super().__init__(config, "midlayer.", 2 * d, {"fc": (d, 3 * d), "lm_head": (len(token_ids), d)}, norms)
        self.state_sizes = np.ones(3, np.float32) if sizes_of_states is None else sizes_of_states

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
        self.value("lm_head").copy_(rows_of(weights.head.parts[0], token_ids))
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
                value.copy_(rows_of(part) / (float(self.state_sizes[2]) if name == "down" else 1.0))
        if layer.mlp_norm is not None:
            self.value("midlayer.post_attention_layernorm").copy_(torch.from_numpy(np.array(layer.mlp_norm.weight)))

    def first(self, states: torch.Tensor) -> torch.Tensor:
        states = states / torch.from_numpy(np.repeat(self.state_sizes, self.config.hidden_size))
        return F.linear(states, self.value("fc"))

    def inputs(self, hidden: torch.Tensor, embeddings: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = self.norm(embeddings, "midlayer.input_layernorm")
        return hidden, torch.cat([tokens, self.norm(hidden, "midlayer.hidden_norm")], dim=-1)

    def read_out(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(self.norm(hidden, "norm"), self.value("lm_head"))
