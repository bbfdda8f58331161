"""Nemotron-H: each layer is a Mamba-2 layer, attention without positions, an MLP with a squared ReLU, or experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bifolio.config import ModelConfig
from bifolio.errors import UnsupportedModelError
from bifolio.model.decoder_fields import activation
from bifolio.model.description import Reading, Values, Writing
from bifolio.model.expert_fields import SIGMOID_EXPERTS, scoring_by
from bifolio.model.families.family import Family
from bifolio.model.fields import REQUIRED, Field, Form, Key
from bifolio.model.model_file import TensorSource
from bifolio.model.recurrent_fields import GGUF_MAMBA, HEADS_BY_LAYER, MAMBA, mamba_names, time_step_limits
from bifolio.model.tensor_names import GGUF_LLAMA, HF_LLAMA
from bifolio.quant.tensor import QuantizedTensor

BLOCKS = "layers_block_type"
KINDS = {
    "M": "mamba",
    "linear_attention": "mamba",
    "*": "attention",
    "full_attention": "attention",
    "-": "mlp",
    "E": "moe",
}


# -- folders ----------------------------------------------------------------------------------------------------------
def layer_kinds(values: Reading) -> list[str]:
    """'mamba', 'attention', 'mlp' or 'moe' for every layer."""
    json, letters = values.json, "hybrid_override_pattern"
    key = next((key for key in (BLOCKS, "layer_types") if json.get(key)), None)
    pattern: Sequence[str] = json.text(letters, "") if key is None else json.texts(key)
    if not pattern:
        raise UnsupportedModelError(f"config.json does not say which layers are recurrent: it needs {BLOCKS}")
    kinds = [KINDS.get(kind, kind) for kind in pattern]
    if unknown := set(kinds) - set(KINDS.values()):
        raise UnsupportedModelError(f"layers of the kind {unknown.pop()!r} are not supported in Nemotron-H")
    return kinds


def of_kind(*wanted: str) -> Form:
    return Form(lambda v: tuple(kind in wanted for kind in layer_kinds(v)))


def write_kinds(values: Writing) -> dict[str, list[str]]:
    def kind(layer: int) -> str:
        if values["layers.mlp"][layer]:
            return "moe" if values.config.has_experts(layer) else "mlp"
        return "attention" if values["layers.attention"][layer] else "mamba"

    return {BLOCKS: [kind(layer) for layer in values.layers]}


def experts_from_hf(values: Reading) -> int:
    if "moe" not in layer_kinds(values):
        return 0
    if values.json.get("moe_latent_size") is not None:
        raise UnsupportedModelError("Nemotron-H with experts over latents (moe_latent_size) is not supported")
    if values["mlp_bias"]:
        raise UnsupportedModelError("Nemotron-H with biases in its experts is not supported")
    keys = ("n_routed_experts", "num_experts", "num_local_experts")
    return values.json.count(next((key for key in keys if values.json.get(key) is not None), keys[0]))


def experts_to_hf(values: Writing) -> dict[str, int]:
    return {} if values.config.moe is None else {"n_routed_experts": values["moe.num_experts"], "n_shared_experts": 1}


@dataclass(frozen=True, slots=True)
class EitherPrefix:
    """The tensors of a folder whose names begin with `backbone.` or `model.`."""

    source: TensorSource
    config: ModelConfig

    def _name(self, name: str) -> str:
        other = name.replace("backbone.", "model.", 1)
        return other if not self.source.has(name) and self.source.has(other) else name

    def has(self, name: str) -> bool:
        return self.source.has(self._name(name))

    def view(self, name: str, shape: tuple[int, ...]) -> QuantizedTensor:
        return self.source.view(self._name(name), shape)


# -- GGUF files -------------------------------------------------------------------------------------------------------
def mlps_from_gguf(values: Reading) -> tuple[bool, ...]:
    return tuple(width > 0 for width in values.header.by_layer(".feed_forward_length", len(values.layers)))


def mlps_to_gguf(values: Writing) -> dict[str, Any]:
    """The widths of MLPs; 0: the layer has none."""
    size = values["moe.expert_size"] or values["intermediate_size"]
    return {"feed_forward_length": np.array([size * has_mlp for has_mlp in values["layers.mlp"]], np.int32)}


def mlp_size(values: Reading) -> int:
    header = values.header
    return header.of_some_layers(".feed_forward_length", 0) or header.count(".expert_feed_forward_length")


def neither(values: Values) -> tuple[bool, ...]:
    """The layers without attention and without an MLP have a recurrence."""
    both = zip(values["layers.attention"], values["layers.mlp"], strict=True)
    return tuple(not attends and not has_mlp for attends, has_mlp in both)


def write_epsilon(values: Writing) -> dict[str, float]:
    return dict.fromkeys(("attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"), values["norm_eps"])


LAYERS = (
    *MAMBA,
    *HEADS_BY_LAYER,
    Field("num_layers", hf=Form(lambda v: len(layer_kinds(v)))),
    Field("layers.attention", hf=Form(of_kind("attention").read, write_kinds)),
    Field("layers.mlp", hf=of_kind("mlp", "moe"), gguf=Form(mlps_from_gguf, mlps_to_gguf)),
    Field("layers.recurrent", default=neither),
    Field("intermediate_size", gguf=Form(mlp_size)),
    Field("recurrent.width", hf=Key(("mamba_d_conv", "conv_kernel"), written="conv_kernel", default=4)),
    Field("recurrent.heads", hf=Key("mamba_num_heads", default=128)),
    Field("recurrent.groups", hf=Key(("mamba_n_groups", "n_groups"), written="n_groups", default=8)),
    Field("recurrent.key_size", hf=Key("ssm_state_size", default=128)),
    Field("recurrent.value_size", hf=Key("mamba_head_dim", default=64)),
    Field("recurrent.conv_bias", hf=Key(("mamba_conv_bias", "use_conv_bias"), written="use_conv_bias", default=True)),
    Field("recurrent.projection_bias", hf="use_bias"),
    Field("recurrent.dt_limits", hf=time_step_limits("mamba_dt_limit", "time_step_limit"), optional=False),
)
MIXTURES = (
    *SIGMOID_EXPERTS,
    Field("moe.num_experts", hf=Form(experts_from_hf, experts_to_hf), gguf=Key("expert_count", default=0)),
    Field("moe.scoring", gguf=scoring_by(lambda v: "sigmoid")),
    Field("moe.num_groups", gguf=None, default=1),
    Field("moe.top_groups", gguf=None, default=lambda v: v["moe.num_groups"]),
    Field("moe.group_best", default=lambda v: 2 if v["moe.num_groups"] > 1 else 1),
    Field("moe.shared_size", hf="moe_shared_expert_intermediate_size", default=REQUIRED),
    Field("layers.dense", hf=of_kind("mlp")),
)

FAMILY = Family(
    name="nemotron_h",
    network={"gated_mlp": False, "ropes": ()},
    fields=(
        *LAYERS,
        *MIXTURES,
        Field("head_dim", hf=Key(("head_dim", "attention_head_dim"), default=128)),
        Field(
            "norm_eps",
            hf=Key(("layer_norm_epsilon", "rms_norm_eps"), default=1e-5),
            gguf=Form(lambda v: v.header.number(".attention.layer_norm_rms_epsilon"), write_epsilon),
        ),
        Field("activation", hf=activation("mlp_hidden_act")),
    ),
    hf_types=("nemotron_h",),
    hf_class="NemotronHForCausalLM",
    hf_modules={"model.": "backbone."},
    hf_defaults={"mlp_hidden_act": "relu2"},
    hf_implied={"layers.window": (), "qkv_bias": False, "output_bias": False},
    hf_always=("mlp_bias",),
    hf_written={"time_step_min": 1e-30},  # transformers takes it as the lower limit
    hf_refused={"attention_bias": "Nemotron-H with biases in attention is not supported"},
    hf_names=replace(
        HF_LLAMA,
        embedding="backbone.embeddings",
        layer="backbone.layers.{}.",
        attention_norm="norm",
        qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
        output="mixer.o_proj",
        mlp_norm="norm",
        up=("mixer.up_proj",),
        down="mixer.down_proj",
        router="mixer.gate",
        selection_bias="mixer.gate.e_score_correction_bias",
        expert_up=("mixer.experts.{}.up_proj",),
        expert_down="mixer.experts.{}.down_proj",
        shared_up=("mixer.shared_experts.up_proj",),
        shared_down="mixer.shared_experts.down_proj",
        final_norm="backbone.norm_f",
        recurrent=mamba_names("mixer"),
    ),
    folder_source=EitherPrefix,
    gguf_architectures=("nemotron_h", "nemotron_h_moe"),
    written_with_experts="nemotron_h_moe",
    gguf_implied={"activation": "relu2"},
    gguf_refused={".moe_latent_size": "Nemotron-H with experts over latents is not supported"},
    gguf_names=replace(
        GGUF_LLAMA,
        mlp_norm="attn_norm",
        up=("ffn_up",),
        expert_up=("ffn_up_exps",),
        shared_up=("ffn_up_shexp",),
        recurrent=GGUF_MAMBA,
    ),
)
