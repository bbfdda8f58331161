"""Command R7B, Command A (Cohere 2): attention and MLP side by side; one of four layers has no window and no rope."""

from bifolio.model.decoder_fields import NORM_EPS, or_one
from bifolio.model.families.family import Family
from bifolio.model.fields import Field, Key
from bifolio.model.window_fields import BY_TYPE, LOCAL_POSITIONS

NETWORK = {"norm": "layer", "norm_bias": False, "parallel_block": True}
FIELDS = (NORM_EPS, Field("logit_scale", hf="logit_scale", gguf=Key("logit_scale", read=or_one)))

FAMILY = Family(
    name="cohere2",
    network=NETWORK,
    fields=(*FIELDS, Field("layers.window", hf=BY_TYPE), LOCAL_POSITIONS),
    window_period=4,
    hf_types=("cohere2",),
    hf_class="Cohere2ForCausalLM",
    hf_defaults={"logit_scale": 0.0625, "sliding_window": 4096, "tie_word_embeddings": True},
    hf_always=("attention_bias",),
    hf_text_part=True,
    hf_interleaved=True,
    gguf_architectures=("cohere2",),
    gguf_written={"rope.scaling.type": "none"},
    gguf_interleaved=True,
)
