"""EXAONE 3, 3.5 and Deep: Llama under other names. Folders have no class of transformers: they bring their own code."""

from __future__ import annotations

from dataclasses import replace

from bifolio.model.decoder_fields import activation
from bifolio.model.families.family import Family
from bifolio.model.fields import Field, Key
from bifolio.model.tensor_names import HF_LLAMA

ATTENTION = "attn.attention."

FAMILY = Family(
    name="exaone",
    fields=(
        Field("num_layers", hf=("num_layers", "num_hidden_layers")),
        Field("norm_eps", hf=Key("layer_norm_epsilon", default=1e-5)),
        Field("activation", hf=activation("activation_function")),
    ),
    hf_types=("exaone",),
    hf_class="ExaoneForCausalLM",
    hf_defaults={"activation_function": "silu"},
    hf_implied={"qkv_bias": False, "output_bias": False, "mlp_bias": False, "layers.window": ()},
    hf_names=replace(
        HF_LLAMA,
        embedding="transformer.wte",
        layer="transformer.h.{}.",
        attention_norm="ln_1",
        qkv=tuple(f"{ATTENTION}{name}_proj" for name in "qkv"),
        output=f"{ATTENTION}out_proj",
        mlp_norm="ln_2",
        up=("mlp.c_fc_0", "mlp.c_fc_1"),
        down="mlp.c_proj",
        final_norm="transformer.ln_f",
    ),
    gguf_architectures=("exaone",),
)
