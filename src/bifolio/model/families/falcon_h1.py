"""Falcon-H1: attention and Mamba-2 side by side in every layer, with factors on almost every product.

GGUF files have the factors in their weights; those of a folder are put into the weights when it is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from bifolio.config import ModelConfig
from bifolio.model.description import Reading, Writing
from bifolio.model.export import NamedTensor
from bifolio.model.families.family import Family
from bifolio.model.fields import Field, Form, Key
from bifolio.model.model_file import Factors
from bifolio.model.recurrent_fields import GGUF_MAMBA, MAMBA, head_size, inner_size, mamba_names
from bifolio.model.stored_form import StoredForm, reading
from bifolio.model.tensor_names import GGUF_LLAMA, HF_LLAMA
from bifolio.quant.tensor import QuantizedTensor

IN_WEIGHTS = Form(lambda v: 1.0)  # GGUF files have the factors in their weights
BIASES = ("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias")
GGUF_FORM = StoredForm(renamed=(("ffn_norm.weight", "ffn_norm"),))  # the only norm without a suffix


def weight_factors(values: Reading) -> tuple[tuple[str, tuple[float, ...]], ...]:
    """(matrix, factors of its pieces) for those that differ from 1."""
    json = values.json
    inputs, outputs = json.number("attention_in_multiplier", 1.0), json.number("attention_out_multiplier", 1.0)
    mlp, pieces = json.numbers("mlp_multipliers", (1.0, 1.0)), json.numbers("ssm_multipliers", (1.0,) * 5)
    if len(mlp) != 2 or len(pieces) != 5:
        raise json.wrong("ssm_multipliers" if len(mlp) == 2 else "mlp_multipliers", "a list of 5 numbers (mlp: of 2)")
    found = {
        "self_attn.q_proj": (inputs,),
        "self_attn.k_proj": (inputs * json.number("key_multiplier", 1.0),),
        "self_attn.v_proj": (inputs,),
        "self_attn.o_proj": (outputs,),
        "mamba.in_proj": tuple(json.number("ssm_in_multiplier", 1.0) * piece for piece in pieces),
        "mamba.out_proj": (json.number("ssm_out_multiplier", 1.0),),
        "feed_forward.gate_proj": mlp[:1],
        "feed_forward.down_proj": mlp[1:],
    }
    return tuple((name, values) for name, values in found.items() if set(values) != {1.0})


def folder_factors(config: ModelConfig, name: str) -> Factors | None:
    own = config.recurrent
    for matrix, values in config.weight_factors:
        if own is not None and name.endswith(f".{matrix}.weight"):
            factors = np.array(values, np.float32)
            return factors if len(values) == 1 else np.repeat(factors, own.input_sizes)
    return None


def value_size(values: Reading) -> int:
    inner = values.json.count("mamba_d_ssm", 0, least=0) or values.json.count("mamba_expand", 2) * values["hidden_size"]
    return head_size(values, inner)


def write_value_size(values: Writing) -> dict[str, int]:
    return {"mamba_d_ssm": inner_size(values), "mamba_d_head": values["recurrent.value_size"]}


def gguf_tensors(tensors: Iterator[NamedTensor], config: ModelConfig) -> Iterator[NamedTensor]:
    """The embeddings and the output contain their factors, so that they are two matrices."""
    is_scaled = (config.embedding_scale, config.logit_scale) != (1.0, 1.0)
    for tensor in GGUF_FORM.tensors(tensors):
        if tensor.kind == "embedding" and is_scaled:
            yield _scaled(tensor, config.embedding_scale)
            if config.tie_embeddings:
                yield _scaled(replace(tensor, name="output.weight", kind="head"), config.logit_scale)
        elif tensor.kind == "head":
            yield _scaled(tensor, config.logit_scale)
        else:
            yield tensor


def _scaled(tensor: NamedTensor, factor: float) -> NamedTensor:
    if factor == 1.0:
        return tensor
    return replace(tensor, tensor=QuantizedTensor.from_array(tensor.rearranged().dequantize() * np.float32(factor)))


FAMILY = Family(
    name="falcon_h1",
    fields=(
        *MAMBA,
        Field("recurrent.value_size", hf=Form(value_size, write_value_size)),
        Field("recurrent.has_norm", hf=Key("mamba_rms_norm", default=False)),
        Field("recurrent.norm_first", hf=Key("mamba_norm_before_gate", default=True)),
        Field("layers.recurrent", default=lambda v: (True,) * len(v.layers)),
        Field("embedding_scale", hf="embedding_multiplier", gguf=IN_WEIGHTS),
        Field("logit_scale", hf="lm_head_multiplier", gguf=IN_WEIGHTS),
        Field("weight_factors", hf=Form(weight_factors), gguf=Form(lambda v: ())),
    ),
    hf_types=("falcon_h1",),
    hf_class="FalconH1ForCausalLM",
    hf_defaults={"rms_norm_eps": 1e-5},
    hf_implied=dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias", "recurrent.projection_bias"), False),
    hf_refused=dict.fromkeys(BIASES, "Falcon-H1 with biases in its projections is not supported"),
    hf_names=replace(
        HF_LLAMA,
        mlp_norm="pre_ff_layernorm",
        up=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down="feed_forward.down_proj",
        final_norm="model.final_layernorm",
        recurrent=mamba_names("mamba"),
    ),
    folder_factors=folder_factors,
    gguf_architectures=("falcon-h1",),
    gguf_names=replace(GGUF_LLAMA, recurrent=GGUF_MAMBA),
    gguf_source=reading(lambda config: GGUF_FORM),
    gguf_tensors=gguf_tensors,
)
