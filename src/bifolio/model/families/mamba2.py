"""Mamba-2 and Codestral Mamba: recurrent layers of the second kind alone."""

from __future__ import annotations

from dataclasses import replace

from bifolio.model.families.family import Family
from bifolio.model.families.mamba import ALONE, HF_NAMES, NETWORK
from bifolio.model.fields import Field, Form, Key
from bifolio.model.recurrent_fields import GGUF_MAMBA, MAMBA, inner_size, mamba_names
from bifolio.model.tensor_names import GGUF_LLAMA

FAMILY = Family(
    name="mamba2",
    network=NETWORK,
    fields=(
        *MAMBA,
        *ALONE,
        Field("recurrent.width", hf=Key("conv_kernel", default=4)),
        Field("recurrent.heads", hf=Key("num_heads", default=128)),
        Field("recurrent.groups", hf=Key("n_groups", default=8)),
        Field("recurrent.key_size", hf=Key("state_size", default=128)),
        Field(
            "recurrent.value_size",
            hf=Form(
                lambda v: v.json.count("head_dim", 64),
                lambda v: {"head_dim": v["recurrent.value_size"], "expand": inner_size(v) // v["hidden_size"]},
            ),
        ),
        Field("recurrent.conv_bias", hf=Key("use_conv_bias", default=True)),
        Field("recurrent.projection_bias", hf="use_bias"),
        Field("tie_embeddings", default=False),
    ),
    hf_types=("mamba2",),
    hf_class="Mamba2ForCausalLM",
    hf_defaults={"bos_token_id": 0, "eos_token_id": 2},
    hf_implied={"qkv_bias": False, "output_bias": False, "mlp_bias": False, "layers.window": ()},
    hf_names=replace(HF_NAMES, recurrent=mamba_names("mixer")),
    gguf_architectures=("mamba2",),
    gguf_written={"attention.head_count": 0, "feed_forward_length": 0},
    gguf_names=replace(GGUF_LLAMA, recurrent=GGUF_MAMBA),
)
