"""Solar Open: GLM-4.5 with experts in every layer, without norms of heads. GGUF files are `glm4moe`."""

from __future__ import annotations

from dataclasses import replace

from bifolio.model.expert_fields import SIGMOID_EXPERTS
from bifolio.model.families.family import Family
from bifolio.model.fields import Field, Key
from bifolio.model.tensor_names import GGUF_LLAMA

FAMILY = Family(
    name="solar_open",
    fields=(
        *SIGMOID_EXPERTS,
        Field("layers.dense", hf=None, default=()),
        Field("intermediate_size", hf=Key("intermediate_size", default=lambda v: v["moe.expert_size"])),
    ),
    hf_types=("solar_open",),
    hf_class="SolarOpenForCausalLM",
    hf_defaults={"rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "head_dim": 128, "num_key_value_heads": 8,
                 "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8,
                 "moe_intermediate_size": 1280, "max_position_embeddings": 131072},
    hf_implied={"output_bias": False, "mlp_bias": False, "layers.window": ()},
    hf_always=("attention_bias",),
    written_as="glm4moe",
    gguf_names=replace(GGUF_LLAMA, mlp_norm="post_attention_norm"),
)  # fmt: skip
