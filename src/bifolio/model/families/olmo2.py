"""OLMo 2: norms on the outputs of attention and MLP only, and on all query and key heads of a token together.

GGUF files of OLMo 3 have the same architecture, with windows.
"""

from dataclasses import replace

from bifolio.model.families.family import Family
from bifolio.model.fields import Field, Form
from bifolio.model.gguf.rope_fields import read_rope, rope_entries
from bifolio.model.tensor_names import HF_LLAMA
from bifolio.model.window_fields import plain_in_windows

NETWORK = {"qk_norm": True, "qk_norm_all_heads": True, "pre_norms": False, "post_norms": True}
HF_NAMES = replace(HF_LLAMA, post_attention_norm="post_attention_layernorm", post_mlp_norm="post_feedforward_layernorm")

FAMILY = Family(
    name="olmo2",
    network=NETWORK,
    fields=(Field("ropes", gguf=Form(lambda v: plain_in_windows(v, read_rope(v)), rope_entries)),),
    window_period=4,
    hf_types=("olmo2",),
    hf_class="Olmo2ForCausalLM",
    hf_defaults={"rms_norm_eps": 1e-5},
    hf_always=("attention_bias",),
    hf_names=HF_NAMES,
    folder_family=lambda config: "olmo3" if any(layer.window for layer in config.layers) else "olmo2",
    gguf_architectures=("olmo2",),
)
