"""ERNIE 4.5 (dense): Llama with rope on neighbouring pairs."""

from bifolio.model.decoder_fields import one_bias
from bifolio.model.families.family import Family

FAMILY = Family(
    name="ernie4_5",
    fields=one_bias("use_bias"),
    hf_types=("ernie4_5",),
    hf_class="Ernie4_5ForCausalLM",
    hf_defaults={"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": True},
    hf_interleaved=True,
    gguf_architectures=("ernie4_5",),
    gguf_interleaved=True,
)
