"""OLMo 3: OLMo 2 with a window on three of four layers. Its GGUF files have the architecture `olmo2`."""

from bifolio.model.families.family import Family
from bifolio.model.families.olmo2 import HF_NAMES, NETWORK
from bifolio.model.fields import Field, Form
from bifolio.model.huggingface.rope_fields import BY_KIND, read_ropes
from bifolio.model.window_fields import BY_TYPE, plain_in_windows

FAMILY = Family(
    name="olmo3",
    network=NETWORK,
    fields=(
        Field("layers.window", hf=BY_TYPE),
        Field("ropes", hf=Form(lambda v: plain_in_windows(v, *read_ropes(v)), BY_KIND.write)),
    ),
    window_period=4,
    hf_types=("olmo3",),
    hf_class="Olmo3ForCausalLM",
    hf_defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096, "rope_theta": 500000.0},
    hf_always=("attention_bias",),
    hf_names=HF_NAMES,
    written_as="olmo2",
)
