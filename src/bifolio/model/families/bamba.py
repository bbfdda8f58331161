"""Bamba: Mamba-2 layers, attention whose heads are rotated by half in a few, and plain MLPs.

GGUF files describe it as a Granite hybrid with factors of 1.
"""

from __future__ import annotations

from dataclasses import replace

from bifolio.config import RopeConfig
from bifolio.model.description import Reading
from bifolio.model.families.family import Family
from bifolio.model.families.granite import SCALES
from bifolio.model.families.granitehybrid import LAYERS, ROPES
from bifolio.model.fields import Field, Form
from bifolio.model.huggingface.rope_fields import NESTED, read_rope, rope_parameters
from bifolio.model.recurrent_fields import GGUF_MAMBA, mamba_names
from bifolio.model.tensor_names import GGUF_LLAMA, HF_LLAMA

ROTATED = 0.5  # part of a head; transformers replaces the value of a folder unless it is among the parameters of rope
INDICES = "attn_layer_indices"


def attention_layers(values: Reading) -> tuple[bool, ...]:
    found = values.json.counts(INDICES, least=0)
    return tuple(layer in found for layer in values.layers)


def ropes(values: Reading) -> tuple[RopeConfig, ...]:
    own = rope_parameters(values).with_defaults({"partial_rotary_factor": ROTATED})
    return (read_rope(values, own, values["head_dim"]),)


FAMILY = Family(
    name="bamba",
    fields=(
        *SCALES,
        *LAYERS,
        ROPES,
        Field("ropes", hf=Form(ropes, NESTED.write)),
        Field("attention_scale", hf=None),
        Field(
            "layers.attention",
            hf=Form(attention_layers, lambda v: {INDICES: [n for n in v.layers if v["layers.attention"][n]]}),
        ),
    ),
    hf_types=("bamba",),
    hf_class="BambaForCausalLM",
    hf_defaults={"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "max_position_embeddings": 262144, "bos_token_id": 1,
                 "eos_token_id": 2},
    hf_implied={"embedding_scale": 1.0, "residual_scale": 1.0, "logit_scale": 1.0},
    hf_always=("attention_bias", "mlp_bias"),
    hf_names=replace(
        HF_LLAMA,
        mlp_norm="pre_ff_layernorm",
        up=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down="feed_forward.down_proj",
        final_norm="model.final_layernorm",
        recurrent=mamba_names("mamba"),
    ),
    written_as="granitehybrid",
    gguf_names=replace(GGUF_LLAMA, recurrent=GGUF_MAMBA),
    gguf_interleaved=True,
)  # fmt: skip
