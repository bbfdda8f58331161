"""Qwen3 with experts in place of the MLPs, such as Qwen3-30B-A3B."""

from bifolio.model.expert_fields import ADDS_UP, EXPERTS, SPARSE_STEPS
from bifolio.model.families.family import Family
from bifolio.model.fields import Field
from bifolio.model.joint_experts import EachExpert
from bifolio.model.window_fields import UPPER_LAYERS

FAMILY = Family(
    name="qwen3moe",
    network={"qk_norm": True},
    fields=(*EXPERTS, SPARSE_STEPS, UPPER_LAYERS, Field("moe.renormalise", hf="norm_topk_prob", gguf=ADDS_UP)),
    hf_types=("qwen3_moe", "qwen3_vl_moe_text", "qwen3_vl_moe"),
    hf_text_part=True,
    folder_source=EachExpert,
    hf_type_defaults={kind: {"norm_topk_prob": True} for kind in ("qwen3_vl_moe_text", "qwen3_vl_moe")},
    hf_class="Qwen3MoeForCausalLM",
    hf_always=("attention_bias",),
    gguf_architectures=("qwen3moe", "qwen3vlmoe"),
)
