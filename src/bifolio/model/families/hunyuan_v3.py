"""Hunyuan 3 (`hy_v3`): norms on each head before rope, sigmoid routing with a bias, a shared MLP beside the experts."""

from __future__ import annotations

from dataclasses import replace

from bifolio.model.expert_fields import ADD_UP, OWN_EXPERTS, SIGMOID_EXPERTS, dense_by_type, of_expert_size
from bifolio.model.families.family import Family
from bifolio.model.fields import Field
from bifolio.model.tensor_names import HF_LLAMA

FAMILY = Family(
    name="hunyuan_v3",
    network={"qk_norm": True},
    fields=(
        *SIGMOID_EXPERTS,
        OWN_EXPERTS,
        ADD_UP,
        Field("moe.scale", hf="router_scaling_factor"),
        Field("moe.num_groups", hf=None),
        Field("moe.top_groups", hf=None),
        Field("moe.shared_size", hf=of_expert_size("num_shared_experts")),
        Field("layers.dense", hf=dense_by_type(1)),
    ),
    hf_types=("hy_v3",),
    hf_class="HYV3ForCausalLM",
    hf_modules={"mlp.shared_experts.": "mlp.shared_mlp.", "mlp.gate.": "mlp.router.gate."},
    hf_defaults={"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "head_dim": 128, "num_experts_per_tok": 8,
                 "num_shared_experts": 1, "moe_intermediate_size": 1536, "router_scaling_factor": 2.826,
                 "rope_theta": 11158840.0},
    hf_implied={"mlp_bias": False, "layers.window": ()},
    hf_always=("attention_bias",),
    hf_refused={"mlp_bias": "Hunyuan 3 with biases in the MLPs is not supported"},
    hf_names=replace(
        HF_LLAMA,
        router="mlp.router.gate",
        selection_bias="mlp.expert_bias",
        shared_up=("mlp.shared_mlp.gate_proj", "mlp.shared_mlp.up_proj"),
        shared_down="mlp.shared_mlp.down_proj",
    ),
    gguf_architectures=("hy_v3",),
)  # fmt: skip
