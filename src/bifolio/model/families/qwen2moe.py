"""Qwen1.5-MoE and Qwen2 with experts beside a gated shared MLP, such as Qwen2-57B-A14B."""

from __future__ import annotations

from typing import Any

from bifolio.config import ModelConfig
from bifolio.errors import UnsupportedModelError
from bifolio.model.description import Reading
from bifolio.model.expert_fields import AS_THEY_ARE
from bifolio.model.families.family import Family
from bifolio.model.families.qwen3next import GATED_EXPERTS, HF_NAMES
from bifolio.model.fields import Field, Form
from bifolio.model.stored_form import StoredForm, reading, writing
from bifolio.model.window_fields import TYPES, upper_windows, write_upper


def windows(values: Reading) -> Any:
    if not values.json.flag("use_sliding_window", False):
        return ()
    if values.json.get(TYPES) is None:
        raise UnsupportedModelError("qwen2_moe with windows but without layer_types in config.json is not supported")
    return upper_windows(values)


def gguf_form(config: ModelConfig) -> StoredForm:
    return StoredForm(flat=("ffn_gate_inp_shexp.weight",))


FAMILY = Family(
    name="qwen2moe",
    fields=(
        *GATED_EXPERTS,
        Field("moe.renormalise", gguf=AS_THEY_ARE),
        Field("qkv_bias", hf="qkv_bias", optional=False),
        Field("layers.window", hf=Form(windows, write_upper)),
    ),
    hf_types=("qwen2_moe",),
    hf_class="Qwen2MoeForCausalLM",
    hf_defaults={"num_key_value_heads": 16, "intermediate_size": 5632, "max_position_embeddings": 32768,
                 "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
                 "shared_expert_intermediate_size": 5632, "norm_topk_prob": False, "sliding_window": 4096,
                 "qkv_bias": True},
    hf_implied={"output_bias": False, "mlp_bias": False},
    hf_names=HF_NAMES,
    gguf_architectures=("qwen2moe",),
    gguf_source=reading(gguf_form),
    gguf_tensors=writing(gguf_form),
)  # fmt: skip
