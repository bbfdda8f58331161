"""FlexOlmo: OLMo 2 with experts in every layer, joined from models that were trained apart.

GGUF files are those of bifolio alone.
"""

from __future__ import annotations

from bifolio.model.expert_fields import EXPERTS, WIDE
from bifolio.model.families.family import Family
from bifolio.model.families.olmo2 import HF_NAMES, NETWORK
from bifolio.model.fields import Field, Key

FAMILY = Family(
    name="flex_olmo",
    network=NETWORK,
    fields=(*EXPERTS, WIDE, Field("moe.renormalise", hf=Key("norm_topk_prob", default=False))),
    hf_types=("flex_olmo",),
    hf_class="FlexOlmoForCausalLM",
    hf_defaults={"rope_theta": 500000.0, "num_experts": 7, "num_experts_per_tok": 5, "max_position_embeddings": 4096,
                 "eos_token_id": 100257},
    hf_implied={"layers.window": ()},
    hf_always=("attention_bias",),
    hf_written={"pad_token_id": None},  # the default lies outside of small vocabularies
    hf_names=HF_NAMES,
    gguf_architectures=("flex-olmo",),
)  # fmt: skip
