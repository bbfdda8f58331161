"""VaultGemma: Gemma 2 without norms on the outputs of attention and MLP. GGUF files are those of bifolio alone."""

from __future__ import annotations

from bifolio.model.families import gemma2
from bifolio.model.families.family import Family
from bifolio.model.families.gemma3 import HF_NAMES, NORM_OFFSET

FAMILY = Family(
    name="vaultgemma",
    fields=gemma2.FIELDS,
    window_period=2,
    hf_types=("vaultgemma",),
    hf_class="VaultGemmaForCausalLM",
    hf_defaults={**gemma2.DEFAULTS, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 8192,
                 "bos_token_id": 2, "eos_token_id": 1},
    hf_always=gemma2.CAPS,
    hf_names=HF_NAMES,
    norm_offset=NORM_OFFSET,
    gguf_architectures=("vaultgemma",),
    gguf_implied={"activation": "gelu_tanh"},
)  # fmt: skip
