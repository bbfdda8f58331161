"""Llama and models of the same architecture, such as SmolLM2 and TinyLlama.

GGUF files of Mistral, Ministral, Mixtral and InternLM3 have this architecture, too.
"""

from functools import partial

from bifolio.model.expert_fields import ADD_UP, EXPERTS, NO_EXPERTS
from bifolio.model.families.family import Family, fresh_decoder
from bifolio.model.families.mistral import folder_family

FAMILY = Family(
    name="llama",
    hf_types=("llama", "smolvlm", "idefics3"),
    hf_text_part=True,
    hf_class="LlamaForCausalLM",
    hf_always=("attention_bias", "mlp_bias"),
    fields=(*EXPERTS, ADD_UP, NO_EXPERTS),
    folder_family=folder_family,
    gguf_architectures=("llama",),
    gguf_interleaved=True,
    fresh_config=partial(fresh_decoder, "llama"),
)
