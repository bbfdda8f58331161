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
    hf_defaults=gemma2.DEFAULTS,
    hf_always=gemma2.CAPS,
    hf_names=HF_NAMES,
    norm_offset=NORM_OFFSET,
    gguf_architectures=("vaultgemma",),
    gguf_implied={"activation": "gelu_tanh"},
)
