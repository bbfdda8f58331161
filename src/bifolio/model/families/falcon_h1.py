"""Falcon-H1: attention and Mamba-2 side by side in every layer, with factors on almost every product.

GGUF files have the factors in their weights; those of a folder are put into the weights when it is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from bifolio.config import ModelConfig, RecurrentConfig
from bifolio.errors import UnsupportedModelError
from bifolio.model.export import NamedTensor
from bifolio.model.families.family import Family
from bifolio.model.families.granitehybrid import (
    GGUF_MAMBA,
    NO_LIMITS,
    dt_limits,
    mamba_entries,
    mamba_from_gguf,
    mamba_names,
)
from bifolio.model.gguf.decoder_config import decoder_from_gguf
from bifolio.model.gguf.entries import Metadata
from bifolio.model.gguf.reader import GgufFile, Value
from bifolio.model.huggingface.decoder_config import Raw, decoder_from_hf, decoder_to_hf
from bifolio.model.model_file import Factors
from bifolio.model.stored_form import StoredForm, reading
from bifolio.model.tensor_names import GGUF_LLAMA, HF_LLAMA
from bifolio.quant.tensor import QuantizedTensor

BIASES = ("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias")
GGUF_FORM = StoredForm(renamed=(("ffn_norm.weight", "ffn_norm"),))  # the only norm without a suffix


# -- folders ----------------------------------------------------------------------------------------------------------
def config_from_hf(raw: Raw, name: str) -> ModelConfig:
    if any(raw.get(field) for field in BIASES):
        raise UnsupportedModelError("Falcon-H1 with biases in its projections is not supported")
    layers = tuple(range(int(raw["num_hidden_layers"])))
    inner = int(raw.get("mamba_d_ssm") or int(raw.get("mamba_expand", 2)) * int(raw["hidden_size"]))
    heads, groups = int(raw.get("mamba_n_heads", 128)), int(raw.get("mamba_n_groups", 1))
    state = int(raw.get("mamba_d_state", 256))
    recurrent = RecurrentConfig(
        "mamba",
        layers=layers,
        attention_layers=layers,
        width=int(raw.get("mamba_d_conv", 4)),
        channels=inner + 2 * groups * state,
        heads=heads,
        groups=groups,
        key_size=state,
        value_size=inner // heads,
        conv_bias=bool(raw.get("mamba_conv_bias", True)),
        has_norm=bool(raw.get("mamba_rms_norm", False)),
        norm_first=bool(raw.get("mamba_norm_before_gate", True)),
        norm_groups=groups,
        dt_limits=dt_limits(raw),
    )
    return decoder_from_hf(
        raw,
        name,
        norm_eps=float(raw.get("rms_norm_eps", 1e-5)),
        embedding_scale=float(raw.get("embedding_multiplier", 1.0)),
        logit_scale=float(raw.get("lm_head_multiplier", 1.0)),
        recurrent=recurrent,
        weight_factors=_factors_from_hf(raw),
    )


def _factors_from_hf(raw: Raw) -> tuple[tuple[str, tuple[float, ...]], ...]:
    """(matrix, factors of its pieces) for those that differ from 1."""
    inputs, outputs = float(raw.get("attention_in_multiplier", 1.0)), float(raw.get("attention_out_multiplier", 1.0))
    gate, down = raw.get("mlp_multipliers") or (1.0, 1.0)
    pieces = raw.get("ssm_multipliers") or (1.0,) * 5
    found = {
        "self_attn.q_proj": (inputs,),
        "self_attn.k_proj": (inputs * float(raw.get("key_multiplier", 1.0)),),
        "self_attn.v_proj": (inputs,),
        "self_attn.o_proj": (outputs,),
        "mamba.in_proj": tuple(float(raw.get("ssm_in_multiplier", 1.0)) * float(piece) for piece in pieces),
        "mamba.out_proj": (float(raw.get("ssm_out_multiplier", 1.0)),),
        "feed_forward.gate_proj": (float(gate),),
        "feed_forward.down_proj": (float(down),),
    }
    return tuple((name, values) for name, values in found.items() if set(values) != {1.0})


def folder_factors(config: ModelConfig, name: str) -> Factors | None:
    own = config.recurrent
    for matrix, values in config.weight_factors:
        if own is not None and name.endswith(f".{matrix}.weight"):
            factors = np.array(values, np.float32)
            return factors if len(values) == 1 else np.repeat(factors, own.input_sizes)
    return None


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The loaded weights contain the factors of the layers."""
    own = config.recurrent
    if own is None:
        raise UnsupportedModelError("a folder of Falcon-H1 describes Mamba layers, which the model lacks")
    return {
        **decoder_to_hf(config),
        "embedding_multiplier": config.embedding_scale,
        "lm_head_multiplier": config.logit_scale,
        "mamba_d_ssm": own.inner_size,
        "mamba_n_heads": own.heads,
        "mamba_d_head": own.value_size,
        "mamba_n_groups": own.groups,
        "mamba_d_state": own.key_size,
        "mamba_d_conv": own.width,
        "mamba_conv_bias": own.conv_bias,
        "mamba_rms_norm": own.has_norm,
        "mamba_norm_before_gate": own.norm_first,
        **({} if own.dt_limits == NO_LIMITS else {"time_step_limit": list(own.dt_limits)}),
    }


# -- GGUF files -------------------------------------------------------------------------------------------------------
def config_from_gguf(file: GgufFile, metadata: Metadata, name: str) -> ModelConfig:
    layers = list(range(metadata.count(".block_count")))
    return decoder_from_gguf(file, metadata, name, recurrent=mamba_from_gguf(file, metadata, layers, layers))


def gguf_entries(config: ModelConfig) -> dict[str, Value]:
    return mamba_entries(config)


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
    hf_types=("falcon_h1",),
    hf_class="FalconH1ForCausalLM",
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
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
    written_as="falcon-h1",
    config_from_gguf=config_from_gguf,
    gguf_names=replace(GGUF_LLAMA, recurrent=GGUF_MAMBA),
    gguf_source=reading(lambda config: GGUF_FORM),
    gguf_tensors=gguf_tensors,
    gguf_entries=gguf_entries,
)
