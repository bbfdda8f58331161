"""A head for multi-token prediction in torch, for training (`train.draft_chain`), in the layout of GLM-4.5.

The layer of such a head has experts. Here its MLP is one of the width of the target's: a half of it is the shared
expert, the other half each of two equal routed experts. A token has one of them with the weight 1, so that it does not
matter which.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace

import numpy as np
import torch
import torch.nn.functional as F

from bifolio.config import ModelConfig, MoeConfig
from bifolio.errors import ConfigError
from bifolio.model.description import undescribed
from bifolio.model.export import named_tensors
from bifolio.model.families.glm4moe import FAMILY as PAIR
from bifolio.model.huggingface.config import config_from_hf, config_to_hf
from bifolio.model.huggingface.folder_writer import folder_config
from bifolio.model.loaded import LoadedModel
from bifolio.model.next_token_head import head_config
from bifolio.model.tensor_names import HF_LLAMA
from bifolio.model.weights import ModelWeights
from bifolio.train.draft_chain import DraftChain
from bifolio.train.head_data import rows_of

NUM_EXPERTS = 2  # the fewest of the family
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
WORKING = (
    "a network like Llama works, such as SmolLM2, TinyLlama and the embedded model stories: without biases, experts, "
    "windows, scales, and norms of queries and keys; --eagle trains heads for other models"
)


def pair_config(weights: ModelWeights) -> ModelConfig:
    """The same network as one of the family of the pair, without experts in its layers; ConfigError if it is none."""
    config = weights.config
    _refuse(config, [name for name in ("moe", "mla", "recurrent", "streams", "layer_inputs", "learned_positions",
                                       "qkv_bias", "qk_norm") if getattr(config, name)])  # fmt: skip
    if config.activation != "silu" or any(len(layer.qkv.parts) != 3 for layer in weights.layers):
        _refuse(config, ["activation" if config.activation != "silu" else "joint qkv matrix"])
    size = expert_size(config)
    moe = MoeConfig(
        num_experts=NUM_EXPERTS,
        top_k=1,
        expert_size=size,
        scoring="sigmoid",
        renormalise=True,
        selection_bias=True,
        group_best=NUM_EXPERTS,
        shared_size=size,
    )
    layers = tuple(replace(layer, dense=True) for layer in config.layers)
    written = folder_config(replace(config, architecture=PAIR.name, moe=moe, layers=layers))
    _refuse(config, undescribed(PAIR, written, "hf"))
    read = config_from_hf(config_to_hf(written))
    _refuse(config, [each.name for each in fields(read) if getattr(read, each.name) != getattr(written, each.name)])
    return written


def expert_size(config: ModelConfig) -> int:
    """The width of an expert: half of that of the target's MLP."""
    return config.intermediate_size // 2


def _refuse(config: ModelConfig, differences: list[str]) -> None:
    if differences:
        raise ConfigError(
            f"a {config.architecture} model with {', '.join(differences)} cannot be written with a head for "
            f"multi-token prediction: {WORKING}"
        )


class MtpHead(DraftChain):
    """The trained weights; embedding and output matrix are the target's."""

    def __init__(self, config: ModelConfig, output: torch.Tensor) -> None:
        """`config`: of the pair; `output`: the target's output matrix."""
        d = config.hidden_size
        layer = replace(head_config(config), intermediate_size=2 * expert_size(config))
        norms = ("enorm", "hnorm", "shared_head.norm", "input_layernorm")
        super().__init__(layer, "", d, {"eh_proj": (d, 2 * d)}, norms)
        self.output, self.number = output, config.num_layers

    @torch.no_grad()
    def start_from(self, target: LoadedModel) -> None:
        """Begin as the target's last layer and norm, which read the normed state."""
        weights, d = target.weights, self.config.hidden_size
        prefix = HF_LLAMA.layer.format(self.number - 1)
        for source in named_tensors(weights, HF_LLAMA, interleaved=False):
            name = source.name.removeprefix(prefix).removesuffix(".weight")
            if source.name.startswith(prefix) and name in self.names:
                value = self.value(name)
                found = rows_of(source.rearranged())
                value.copy_(found[tuple(slice(size) for size in value.shape)])
        self.value("shared_head.norm").copy_(torch.from_numpy(np.array(weights.final_norm.weight)))
        self.value("eh_proj")[:, d:] += torch.eye(d)

    def tensors(self) -> Mapping[str, np.ndarray]:
        """The tensors of the head in the folder of the pair, whose layers they follow."""
        values = {name: value.detach().numpy() for name, value in zip(self.names, self.values, strict=True)}
        named = {name: value for name, value in values.items() if name not in MLP}
        for name in MLP:
            halves = np.split(values[name], 2, axis=1 if name == "mlp.down_proj" else 0)
            short = name.removeprefix("mlp.")
            named[f"mlp.shared_experts.{short}"] = halves[0]
            named |= {f"mlp.experts.{expert}.{short}": halves[1] for expert in range(NUM_EXPERTS)}
        named["mlp.gate"] = np.zeros((NUM_EXPERTS, self.config.hidden_size), np.float32)
        prefix = HF_LLAMA.layer.format(self.number)
        tensors = {f"{prefix}{name}.weight": np.ascontiguousarray(value) for name, value in named.items()}
        return {**tensors, prefix + HF_LLAMA.selection_bias: np.zeros(NUM_EXPERTS, np.float32)}

    def first(self, states: torch.Tensor) -> torch.Tensor:
        return states

    def inputs(self, hidden: torch.Tensor, embeddings: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        both = torch.cat([self.norm(embeddings, "enorm"), self.norm(hidden, "hnorm")], dim=-1)
        x = F.linear(both, self.value("eh_proj"))
        return x, self.norm(x, "input_layernorm")

    def read_out(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(self.norm(hidden, "shared_head.norm"), self.output)
