"""Granite 3 and 4 (dense): Llama with factors on embeddings, residual additions, attention scores and logits."""

from bifolio.model.decoder_fields import stored_scale
from bifolio.model.families.family import Family
from bifolio.model.fields import Field, Key

SCALES = (
    Field("embedding_scale", hf="embedding_multiplier", gguf=Key("embedding_scale", read=lambda x: x or 1.0)),
    Field("residual_scale", hf="residual_multiplier", gguf=Key("residual_scale", read=lambda x: x or 1.0)),
    Field("attention_scale", hf=stored_scale("attention_multiplier", 1.0)),
    Field(
        "logit_scale",
        hf=Key("logits_scaling", read=lambda x: 1 / x),
        gguf=Key("logit_scale", read=lambda x: 1 / (x or 1.0)),
        write=lambda x: 1 / x,
    ),
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
