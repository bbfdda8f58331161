"""GLM-4.5 with experts: sigmoid routing with a bias, shared experts, plain MLPs in the first layers."""

from dataclasses import replace

from bifolio.model.decoder_fields import in_tensors
from bifolio.model.expert_fields import SIGMOID_EXPERTS, leading
from bifolio.model.families.family import Family
from bifolio.model.fields import Field
from bifolio.model.next_token_names import GGUF_NEXT_TOKEN, HF_NEXT_TOKEN
from bifolio.model.tensor_names import GGUF_LLAMA

FAMILY = Family(
    name="glm4moe",
    fields=(
        *SIGMOID_EXPERTS,
        Field("layers.dense", hf=leading("first_k_dense_replace", 1)),
        Field("qk_norm", hf="use_qk_norm", gguf=in_tensors("attn_q_norm.weight")),
    ),
    hf_types=("glm4_moe",),
    hf_class="Glm4MoeForCausalLM",
    hf_defaults={"partial_rotary_factor": 0.5},
    hf_implied={"output_bias": False, "mlp_bias": False, "attention_softcap": 0.0, "logit_softcap": 0.0,
                "layers.window": ()},
    hf_always=("attention_bias", "partial_rotary_factor"),
    gguf_architectures=("glm4moe",),
    gguf_names=replace(GGUF_LLAMA, mlp_norm="post_attention_norm"),
    hf_next_token=HF_NEXT_TOKEN,
    gguf_next_token=GGUF_NEXT_TOKEN,
)  # fmt: skip
