"""EXAONE 4: norms on the outputs of attention and MLP only, and on each query and key head.

Large models have a window on three of four layers, and no rope on the fourth.
"""

from bifolio.model.families.family import Family
from bifolio.model.families.olmo2 import HF_NAMES
from bifolio.model.fields import Field
from bifolio.model.window_fields import BY_TYPE, LOCAL_POSITIONS

FAMILY = Family(
    name="exaone4",
    network={"qk_norm": True, "pre_norms": False, "post_norms": True},
    fields=(Field("layers.window", hf=BY_TYPE), LOCAL_POSITIONS),
    window_period=4,
    hf_types=("exaone4",),
    hf_class="Exaone4ForCausalLM",
    hf_defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096},
    hf_names=HF_NAMES,
    gguf_architectures=("exaone4",),
)
