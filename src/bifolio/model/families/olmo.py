"""OLMo 1: Llama with layer norms that have neither weights nor biases."""

from bifolio.model.families.family import Family

CLIPPED = "OLMo with clipped queries, keys and values (clip_qkv) is not supported"

FAMILY = Family(
    name="olmo",
    network={"norm": "layer", "norm_weight": False, "norm_bias": False},
    hf_types=("olmo",),
    hf_class="OlmoForCausalLM",
    hf_defaults={"eos_token_id": 50279},
    hf_implied={"norm_eps": 1e-5, "mlp_bias": False},
    hf_always=("attention_bias",),
    hf_refused={"clip_qkv": CLIPPED},
    gguf_architectures=("olmo",),
    gguf_refused={".attention.clamp_kqv": CLIPPED},
    gguf_interleaved=True,
)
