"""dots.llm1: sigmoid routing with a bias, shared experts, plain MLPs in the first layers, norms of heads."""

from bifolio.model.expert_fields import SIGMOID_EXPERTS
from bifolio.model.families.family import Family
from bifolio.model.fields import Field, Form
from bifolio.model.window_fields import upper_windows, write_upper

FAMILY = Family(
    name="dots1",
    network={"qk_norm": True},
    fields=(
        *SIGMOID_EXPERTS,
        Field("layers.window", hf=Form(upper_windows, lambda v: write_upper(v) or {"sliding_window": None})),
    ),
    hf_types=("dots1",),
    hf_class="Dots1ForCausalLM",
    hf_defaults={"num_key_value_heads": 32, "moe_intermediate_size": 1408, "norm_topk_prob": False, "topk_group": 1,
                 "sliding_window": 4096, "max_window_layers": 62},
    hf_implied={"mlp_bias": False},
    hf_always=("attention_bias",),
    gguf_architectures=("dots1",),
)  # fmt: skip
