"""OLMo 2: norms on the outputs of attention and MLP, and on all heads of a token. GGUF files of OLMo 3 have it, too."""

from dataclasses import replace

from bifolio.model.families.family import Family
from bifolio.model.fields import Field
from bifolio.model.gguf.rope_fields import PLAIN_IN_WINDOWS
from bifolio.model.tensor_names import HF_LLAMA

NETWORK = {"qk_norm": True, "qk_norm_all_heads": True, "pre_norms": False, "post_norms": True}
HF_NAMES = replace(HF_LLAMA, post_attention_norm="post_attention_layernorm", post_mlp_norm="post_feedforward_layernorm")

FAMILY = Family(
    name="olmo2",
    network=NETWORK,
    fields=(Field("ropes", gguf=PLAIN_IN_WINDOWS),),
    window_period=4,
    hf_types=("olmo2",),
    hf_class="Olmo2ForCausalLM",
    hf_defaults={"rms_norm_eps": 1e-5},
    hf_always=("attention_bias",),
    hf_names=HF_NAMES,
    folder_family=lambda config: "olmo3" if any(layer.window for layer in config.layers) else "olmo2",
    gguf_architectures=("olmo2",),
)
