"""Granite 3 and 4 (dense): Llama with factors on embeddings, residual additions, attention scores and logits."""

from bifolio.model.decoder_fields import inverse, or_one, stored_scale
from bifolio.model.families.family import Family
from bifolio.model.fields import Field, Key

LOGIT_SCALE = Key("logit_scale", read=lambda x: inverse(or_one(x)))
SCALES = (
    Field("embedding_scale", hf="embedding_multiplier", gguf=Key("embedding_scale", read=or_one)),
    Field("residual_scale", hf="residual_multiplier", gguf=Key("residual_scale", read=or_one)),
    Field("attention_scale", hf=stored_scale("attention_multiplier", 1.0)),
    Field("logit_scale", hf="logits_scaling", gguf=LOGIT_SCALE, read=inverse, write=inverse),
)

FAMILY = Family(
    name="granite",
    fields=SCALES,
    hf_types=("granite",),
    hf_class="GraniteForCausalLM",
    hf_always=("attention_bias", "mlp_bias"),
    gguf_architectures=("granite",),
    gguf_interleaved=True,
)
