"""Helium 1: Llama with rope on neighbouring pairs. GGUF files are those of bifolio alone."""

from __future__ import annotations

from bifolio.model.families.family import Family

FAMILY = Family(
    name="helium",
    hf_types=("helium",),
    hf_class="HeliumForCausalLM",
    hf_defaults={"rms_norm_eps": 1e-8, "rope_theta": 100000.0, "head_dim": 128, "num_key_value_heads": 20,
                 "max_position_embeddings": 4096, "bos_token_id": 1, "eos_token_id": 2},
    hf_implied={"output_bias": False, "layers.window": ()},
    hf_always=("attention_bias", "mlp_bias"),
    hf_interleaved=True,
    gguf_architectures=("helium",),
    gguf_interleaved=True,
)  # fmt: skip
