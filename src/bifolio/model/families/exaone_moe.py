"""EXAONE with experts (K-EXAONE): sigmoid routing with a bias; three of four layers have a window, and rope."""

from __future__ import annotations

from dataclasses import replace

from bifolio.model.expert_fields import OWN_EXPERTS, SIGMOID_EXPERTS, dense_by_type, of_expert_size
from bifolio.model.families.family import Family
from bifolio.model.fields import Field
from bifolio.model.tensor_names import HF_LLAMA
from bifolio.model.window_fields import BY_TYPE, LOCAL_POSITIONS

FAMILY = Family(
    name="exaone_moe",
    network={"qk_norm": True},
    fields=(
        *SIGMOID_EXPERTS,
        OWN_EXPERTS,
        Field("moe.shared_size", hf=of_expert_size("num_shared_experts")),
        Field("layers.dense", hf=dense_by_type(1)),
        Field("layers.window", hf=BY_TYPE),
        LOCAL_POSITIONS,
    ),
    window_period=4,
    hf_types=("exaone_moe",),
    hf_class="ExaoneMoeForCausalLM",
    hf_defaults={"rms_norm_eps": 1e-5, "num_key_value_heads": 32, "num_experts": 64, "num_experts_per_tok": 8,
                 "num_shared_experts": 1, "moe_intermediate_size": 1024, "routed_scaling_factor": 2.5,
                 "sliding_window": 4096, "bos_token_id": 1, "eos_token_id": 53},
    hf_implied={"qkv_bias": False, "output_bias": False, "mlp_bias": False},
    hf_names=replace(HF_LLAMA, selection_bias="mlp.e_score_correction_bias"),
    gguf_architectures=("exaone-moe",),
)  # fmt: skip
