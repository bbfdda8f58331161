"""OLMoE: experts in every layer, and norms on all query and key heads of a token together."""

from bifolio.model.expert_fields import AS_THEY_ARE, EXPERTS, WIDE
from bifolio.model.families.family import Family
from bifolio.model.fields import Field

FAMILY = Family(
    name="olmoe",
    network={"qk_norm": True, "qk_norm_all_heads": True},
    fields=(*EXPERTS, WIDE, Field("moe.renormalise", hf="norm_topk_prob", gguf=AS_THEY_ARE)),
    hf_types=("olmoe",),
    hf_class="OlmoeForCausalLM",
    hf_defaults={"rms_norm_eps": 1e-5},
    hf_always=("attention_bias",),
    hf_refused={"clip_qkv": "OLMoE with clipped queries, keys and values is not supported"},
    gguf_architectures=("olmoe",),
)
