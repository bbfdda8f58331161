"""Gemma 1 and CodeGemma: Llama with scaled embeddings, norm weights stored minus one, and a GELU in the MLP."""

from bifolio.model.decoder_fields import activation
from bifolio.model.families.family import Family
from bifolio.model.families.gemma3 import EMBEDDING_SCALE, NORM_OFFSET, TANH
from bifolio.model.fields import Field

FAMILY = Family(
    name="gemma",
    fields=(EMBEDDING_SCALE, Field("activation", hf=activation("hidden_act", gelu="gelu_tanh"))),
    hf_types=("gemma",),
    hf_class="GemmaForCausalLM",
    hf_defaults={"head_dim": 256, "num_key_value_heads": 16, "hidden_act": TANH, "max_position_embeddings": 8192,
                 "tie_word_embeddings": True, "bos_token_id": 2, "eos_token_id": 1},
    hf_implied={"mlp_bias": False, "layers.window": ()},
    hf_always=("attention_bias",),
    hf_refused={"use_bidirectional_attention": "models whose tokens attend to later ones are not supported"},
    norm_offset=NORM_OFFSET,
    gguf_architectures=("gemma",),
    gguf_implied={"activation": "gelu_tanh"},
)  # fmt: skip
